"""Modules of the tests of nnScaler's door."""

from typing import Any

import torch
from torch import nn


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
