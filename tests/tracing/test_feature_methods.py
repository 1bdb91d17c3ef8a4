"""Feature methods of vision-language models: one node, or traced through where they run layers."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.exact import assert_exact


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
