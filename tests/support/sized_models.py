"""Models whose forward asks for sizes of its inputs, so that no trace is possible before these are known."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nxdpp.pipeline.microbatches.rows import split_inputs
from tests.support.plain_models import WIDTH, Block


class Stem(nn.Module):
    """Patches of an image, with statistics that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches: torch.Tensor = self.norm(self.patches(x))
        return patches.flatten(2).transpose(1, 2)


class DynamicImages(nn.Module):
    """Images of any size are padded to whole patches; the head is registered before the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Parameter(torch.randn(1, 64, WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.stem = Stem()
        self.out_norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.ndim != 4:
            raise ValueError("images must have four dimensions")
        _, _, height, width = x.shape
        missing = (4 - height % 4) % 4, (4 - width % 4) % 4
        if missing[0] or missing[1]:
            x = F.pad(x, (0, missing[1], 0, missing[0]))
        hidden = self.stem(x)
        hidden = hidden + self.positions[:, : hidden.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.out_norm(hidden.mean(1))), y)


def images(rows: int, height: int = 10, width: int = 8) -> dict[str, torch.Tensor]:
    """A batch of ``DynamicImages`` and ``SkipNet``."""
    generator = torch.Generator().manual_seed(height)
    return {
        "x": torch.randn(rows, 3, height, width, generator=generator),
        "y": torch.randint(3, (rows,), generator=generator),
    }


class Convolution(nn.Module):
    """A layer of ``SkipNet``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.convolution(x))


class SkipNet(nn.Module):
    """A U-Net: skips cross all stages, and the middle is registered after the way up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down = nn.ModuleList(Convolution(WIDTH) for _ in range(2))
        self.up = nn.ModuleList(Convolution(2 * WIDTH) for _ in range(2))
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        skips = []
        for down in self.down:
            hidden = down(hidden)
            skips.append(hidden)
            if min(hidden.shape[-2:]) > 2:
                hidden = F.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden)
        for up in self.up:
            skip = skips.pop()
            if hidden.shape[-2:] != skip.shape[-2:]:
                hidden = F.interpolate(hidden, size=skip.shape[-2:])
            hidden = up(torch.cat([hidden, skip], 1))
        return F.cross_entropy(self.head(hidden.mean((2, 3))), y)


class TakesAnyInputs(nn.Module):
    """No input is named, so no trace is possible at construction; modules are registered in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(batch["x"]) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(self.head(hidden), batch["y"])


class ShortFirst(TakesAnyInputs):
    """The order of the two halves depends on the rows of a microbatch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.embedding(x) * self.scale
        for index in [0, 1, 2, 3] if x.shape[0] < 4 else [2, 3, 0, 1]:
            hidden = self.blocks[index](hidden)
        return F.mse_loss(self.head(hidden), y)


def vectors(rows: int) -> dict[str, torch.Tensor]:
    """A batch of ``TakesAnyInputs`` and ``ShortFirst``."""
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, 1, generator=generator)}


def train_whole(model: nn.Module, batch: Mapping[str, Any], parts: int) -> list[torch.Tensor]:
    """Accumulate the gradients of the mean loss of ``parts`` microbatches; return the losses."""
    losses = []
    for part in split_inputs(batch, parts):
        loss = model(**part)
        (loss / parts).backward()
        losses.append(loss.detach())
    return losses
