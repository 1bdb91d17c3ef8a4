"""Gradients cross a boundary with the strides that they have in one process, so that all sums have its bits."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import gradient_differences
from tests.support.run_ranks import run_ranks

WIDTH = 32
# The strides of each gradient of a layer's output, in the order of the backward.
_strides: list[tuple[int, ...]] = []


class Layer(nn.Module):
    """Notes the strides of the gradient of its output."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.compute(hidden)
        output.register_hook(lambda gradient: _strides.append(gradient.stride()))
        return output

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Convolution(Layer):
    """A depthwise convolution over tokens, as in XCiT: its gradient is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.convolution(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.scale * mixed
        return hidden + self.linear(hidden)  # type: ignore[no-any-return]


class Joined(Layer):
    """Adds tokens of its own: the gradient of the earlier ones is a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.token = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, 2, WIDTH))

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.token.expand(len(hidden), -1, -1), hidden], 1)
        return self.linear(joined)[:, 1:]  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.ModuleList(layer() for _ in range(6))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden.mean(1)), y)


def difference(layer: type[Layer], schedule: str, chunks: int) -> list[str]:
    """Names of what differs after each of two steps."""
    torch.manual_seed(0)
    model = Model(layer)
    whole = copy.deepcopy(model)
    batch = {"x": torch.randn(8, 3, 16, 24), "y": torch.randint(0, 10, (8,))}
    wrapped = NxDPPModel(
        model, layer, 4, chunks, input_names=["x", "y"], schedule=schedule, broadcast_and_average_loss=True
    )
    different: list[str] = []
    for _ in range(2):
        _strides.clear()
        loss = wrapped.run_train(**batch)
        ours = sorted(_strides)
        _strides.clear()
        losses = []
        for x, y in zip(batch["x"].chunk(4), batch["y"].chunk(4), strict=True):
            losses.append(whole(x, y))
            (losses[-1] / 4).backward()
        different += gradient_differences(wrapped, whole)
        different += [] if torch.equal(loss, torch.stack(losses).mean()) else ["loss"]
        kinds = set(_strides)
        different += [f"strides {stride}" for stride in set(ours) if stride not in kinds]
    return different


def train(rank: int) -> dict[Any, list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return {
        (layer, schedule): difference(layer, schedule, chunks)
        for layer in (Convolution, Joined)
        for schedule, chunks in (("1f1b", 1), ("interleaved", 3), ("zb-v", 1))
    }


def test_over_two_ranks() -> None:
    for rank in run_ranks(2, train):
        assert not any(rank.values()), rank
