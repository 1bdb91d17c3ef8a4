"""Modules of the user's own around tiny transformers models: heads, losses, two models, Lightning-like modules."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ViTConfig,
    ViTModel,
)

WIDTH = 32
LAYERS = 4
IMAGE = 16
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TOKENS: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **TOKENS, "num_key_value_heads": 2, **changes})


def bert(**changes: Any) -> BertConfig:
    return BertConfig(**{**SIZES, **TOKENS, **changes})


def initialised(model: nn.Module, seed: int = 1) -> nn.Module:
    """``model`` with the same random weights each time, also in norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * 0.3)
    return model


def batch(*names: str) -> dict[str, torch.Tensor]:
    """Inputs of eight rows: padded tokens with their mask, images, and labels."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 60, (8, 10), generator=generator)
    mask = torch.ones(8, 10, dtype=torch.int64)
    mask[1, 7:] = mask[4, 5:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    images = torch.randn(8, 3, IMAGE, IMAGE, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids, "pixel_values": images}
    return {name: inputs[name] for name in names}


def pairwise(rewards: torch.Tensor) -> torch.Tensor:
    """Loss of chosen rewards, the first half, and rejected ones."""
    chosen, rejected = rewards.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


class RewardHead(nn.Module):
    """A score of the last token that is no padding; chosen and rejected texts in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModel(llama())
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return pairwise(self.score(hidden)[rows, attention_mask.sum(1) - 1].squeeze(-1))


class ValueHead(nn.Module):
    """A language model with a value for each token, made of its last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = LlamaForCausalLM(llama())
        self.v_head = nn.Linear(WIDTH, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.pretrained_model.model(input_ids).last_hidden_state
        logits = self.pretrained_model.lm_head(hidden)
        loss = self.pretrained_model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        result: torch.Tensor = loss + self.v_head(hidden).squeeze(-1).pow(2).mean()
        return result


class DetachedTeacher(nn.Module):
    """A student that learns from a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = LlamaForCausalLM(llama()).requires_grad_(False)
        self.student = LlamaForCausalLM(llama(num_hidden_layers=2))

    def teach(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        logits: torch.Tensor = self.teacher(input_ids, attention_mask=attention_mask).logits.detach()
        return logits

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        taught = self.teach(input_ids, attention_mask)
        output = self.student(input_ids, attention_mask=attention_mask, labels=labels)
        distance = F.kl_div(output.logits.log_softmax(-1), taught.softmax(-1), reduction="batchmean")
        result: torch.Tensor = output.loss + distance
        return result


class TeacherWithoutGradients(DetachedTeacher):
    """A teacher that runs without gradients."""

    def teach(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.teacher(input_ids, attention_mask=attention_mask).logits
        return logits


class TwoTowers(nn.Module):
    """A text and an image encoder with a symmetric contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.text = BertModel(bert())
        self.vision = ViTModel(ViTConfig(**SIZES, image_size=IMAGE, patch_size=8))
        self.text_projection = nn.Linear(WIDTH, 16)
        self.image_projection = nn.Linear(WIDTH, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        text = F.normalize(self.text_projection(self.text(input_ids).pooler_output), dim=-1)
        image = F.normalize(self.image_projection(self.vision(pixel_values).pooler_output), dim=-1)
        logits = text @ image.T * self.scale.exp()
        own = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class LightningLike(nn.Module):
    """A module that names the inputs of its model and asks it for a cache."""

    def __init__(self, config: LlamaConfig | None = None) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config or llama())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels, use_cache=True)[0]


class PassesOn(nn.Module):
    """A module that passes on whatever it is given, as ``DistributedDataParallel`` does."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module: Any = module or LightningLike()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Tuples(nn.Module):
    """A model whose configuration asks for tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BertForMaskedLM(bert(return_dict=False, tie_word_embeddings=False))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss, logits = self.model(input_ids, labels=labels)
        result: torch.Tensor = loss + logits.pow(2).mean()
        return result
