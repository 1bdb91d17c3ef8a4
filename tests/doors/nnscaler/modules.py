"""Modules of the tests of nnScaler's door."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    ElectraConfig,
    PreTrainedModel,
    RobertaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support import models


class EndToEnd(nn.Module):
    """The seed's end-to-end module: linear layers in a list, a loss of a sample in a dict."""

    def __init__(self, layers: int = 8, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.loss_fn = nn.BCELoss()

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.loss_fn(torch.sigmoid(x), data["target"])
        return loss


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """An embedding, blocks and a head, and their loss for a sample in a dict."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 32)

    def forward(self, sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(sample["tokens"])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), sample["labels"].flatten()), logits


class Wrapped(nn.Module):
    """A tiny model of transformers whose forward takes one sample, as an end-to-end module's does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model: PreTrainedModel = _made(name)

    def forward(self, sample: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**sample).loss
        return loss

    def sample(self) -> dict[str, torch.Tensor]:
        return models.padded_batch(2)


def _made(name: str) -> Any:
    if name in ("gpt2", "bert"):
        return models.make(name, layers=2)
    if name == "t5":
        sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
        sizes |= {"dropout_rate": 0.0, "vocab_size": 64, "decoder_start_token_id": 0}
        return T5ForConditionalGeneration(T5Config(**sizes))
    kind = {"roberta": RobertaConfig, "electra": ElectraConfig}[name]
    config: Any = kind(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, pad_token_id=0
    )
    return AutoModelForMaskedLM.from_config(config)


def flipped_if_large(x: torch.Tensor) -> torch.Tensor:
    """Ask about data, which a trace cannot answer."""
    return -x if x.sum() > 3 else x


def sample_of(module: nn.Module, rows: int = 2) -> dict[str, Any]:
    """Arguments of one forward of ``module``, by name."""
    if isinstance(module, EndToEnd):
        width = next(module.parameters()).shape[0]
        return {"data": {"data": torch.rand(rows, width), "target": torch.rand(rows, width)}}
    tokens = torch.arange(rows * 4).reshape(rows, 4)
    return {"sample": {"tokens": tokens, "labels": tokens.flip(0)}}
