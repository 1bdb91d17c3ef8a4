"""Feature methods of vision-language models: one node, or traced through where they run layers."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.llava.modeling_llava import LlavaModelOutputWithPast

from tests.support.exact import assert_exact
from tests.support.vision_language import IMAGE, make_vision_language


class _Contrastive(nn.Module):
    """The loss that CLIP computes if it is asked to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss
        return loss


def test_a_method_that_runs_layers_is_traced_through() -> None:
    part: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(
        text_config={**part, "vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**part, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config)
    inputs = {"input_ids": torch.randint(3, 32, (4, 6)), "pixel_values": torch.randn(4, 3, 16, 16)}

    pipeline = assert_exact(_Contrastive(model), inputs, stages=3)

    assert len(pipeline.partition.layers) == 4


class _AsksForImages(transformers.LlavaModel):
    """A model that asks whether its features are there, in the way of Step3-VL."""

    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        if pixel_values.sum().item() > 1e6:
            pixel_values = pixel_values / 2
        hidden = self.vision_tower(pixel_values).last_hidden_state[:, 1:]
        return BaseModelOutputWithPooling(pooler_output=self.multi_modal_projector(hidden))

    def forward(self, input_ids: Tensor, pixel_values: Tensor, **kwargs: Any) -> LlavaModelOutputWithPast:
        outputs = {"image": self.get_image_features(pixel_values, return_dict=True)}
        embeds = self.get_input_embeddings()(input_ids)
        if outputs.get("image"):
            mask = (input_ids == IMAGE).unsqueeze(-1)
            embeds = embeds.masked_scatter(mask, outputs["image"].pooler_output)
        hidden = self.language_model(inputs_embeds=embeds).last_hidden_state
        return LlavaModelOutputWithPast(last_hidden_state=hidden)


def test_features_are_there() -> None:
    model, batch = make_vision_language("llava")
    inner: Any = model.model
    inner.__class__ = _AsksForImages

    assert_exact(model, batch, stages=3)
