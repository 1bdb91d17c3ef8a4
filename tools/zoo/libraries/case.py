"""A model of a library: its constructor, its inputs and its layer class."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
CLASSES = 5


class Case(NamedTuple):
    """One row of the page.

    Attributes:
        build: makes the model in training mode, in a module with a loss.
        batch: makes a batch of so many rows from a generator.
        layers: the layer class or classes by name, or ``None`` if the library's model needs no such argument.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    layers: str | list[str] | None = None


class Classified(nn.Module):
    """Cross-entropy of a classifier of images or of series."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


class NextToken(nn.Module):
    """Cross-entropy of each token after the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def images(side: int = 32, classes: int = CLASSES, channels: int = 3) -> Callable[[torch.Generator, int], Batch]:
    """Images ``(rows, channels, side, side)`` with a class each."""

    def batch(generator: torch.Generator, rows: int) -> Batch:
        pixels = torch.randn(rows, channels, side, side, generator=generator)
        return {"x": pixels, "y": torch.randint(classes, (rows,), generator=generator)}

    return batch


def tokens(length: int = 16, vocabulary: int = 64, name: str = "ids") -> Callable[[torch.Generator, int], Batch]:
    """Tokens ``(rows, length)``."""

    def batch(generator: torch.Generator, rows: int) -> Batch:
        return {name: torch.randint(vocabulary, (rows, length), generator=generator)}

    return batch
