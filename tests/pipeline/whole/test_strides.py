"""Gradients cross a boundary with the strides that they have in one process, so that all sums have its bits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
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


class Mean(Layer):
    """Uses the mean over tokens alone: its gradient is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.token = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(6, WIDTH))

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.token * self.linear(hidden.mean(1)).tanh().unsqueeze(1)  # type: ignore[no-any-return]


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


def difference(layer: type[Layer], seed: int, schedule: str, chunks: int) -> list[str]:
    """Names of what differs after each of two steps."""
    torch.manual_seed(seed)
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


def train(rank: int, ranks: int, layer: type[Layer], schedules: list[tuple[str, int]]) -> dict[Any, list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    return {
        (schedule, seed): difference(layer, seed, schedule, chunks)
        for schedule, chunks in schedules
        for seed in range(2)
    }


@pytest.mark.parametrize("layer", [Convolution, Mean, Joined])
def test_over_two_ranks(layer: type[Layer]) -> None:
    schedules = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 3), ("zb-v", 1), ("v-half", 1)]
    for rank in run_ranks(2, train, 2, layer, schedules):
        assert not any(rank.values()), rank


@pytest.mark.parametrize("layer", [Convolution, Joined])
def test_over_three_ranks(layer: type[Layer]) -> None:
    for rank in run_ranks(3, train, 3, layer, [("1f1b", 1), ("zb1p", 1)]):
        assert not any(rank.values()), rank
