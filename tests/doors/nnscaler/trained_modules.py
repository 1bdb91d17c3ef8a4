"""Small modules that the tests train through nnScaler's door."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 8


class Net(nn.Module):
    """Not end-to-end: returns hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        """Return hidden values (B, WIDTH) of ``x`` (B, WIDTH)."""
        hidden: torch.Tensor = self.second(self.first(x).relu()) * self.scale + self.shift
        return hidden**power


@dataclass
class Held:
    """A value that torch's pytree does not enter."""

    x: torch.Tensor


class NetOfHeld(Net):
    """Takes ``Held``."""

    def forward(self, held: Any, power: int = 1) -> torch.Tensor:
        """Return hidden values (B, WIDTH) of ``held.x`` (B, WIDTH)."""
        return super().forward(held.x, power)


class Mlp(nn.Module):
    """End-to-end: a sample is a dict of ``data`` and ``target``, both (B, WIDTH)."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def forward(self, data: dict[str, torch.Tensor], power: int = 2) -> Any:
        """Return the loss."""
        x = data["data"]
        for layer in self.layers:
            x = layer(x).tanh()
        return ((x - data["target"]) ** power).mean()


class TiedMlp(Mlp):
    """Its first and last layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight = self.layers[0].weight


class SwitchedMlp(Mlp):
    """Has another loss in training, and returns hidden values too."""

    def forward(self, data: dict[str, torch.Tensor], power: int = 2) -> Any:
        """Return the loss and the hidden values (B, WIDTH)."""
        x = data["data"]
        for layer in self.layers:
            x = layer(x).tanh()
        loss = ((x - data["target"]) ** power).mean()
        return (3 * loss if self.training else loss), {"hidden": x}


def sample(seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Return a sample of ``Mlp``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "data": torch.randn(rows, WIDTH, generator=generator),
        "target": torch.randn(rows, WIDTH, generator=generator),
    }
