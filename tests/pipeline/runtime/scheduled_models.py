"""Small plain models for pipelines of many stages, and their steps in one process."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from tests.support.plain_models import WIDTH, Block


class Chain(nn.Module):
    """Each layer takes the output of the previous one; the output is the loss, of shape ()."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


class Skips(Chain):
    """Every later layer also uses two early values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](self.embedding(x))
        second = self.blocks[1](first)
        hidden = self.blocks[2](second * first)
        for block in self.blocks[3:]:
            hidden = block(hidden * first + second)
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


class InPlaceBlock(Block):
    """A layer that changes its input in place."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.linear(hidden.relu_())
        return changed


class InPlace(Chain):
    """Each layer changes its input in place, also when the previous layer is on the same rank."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.blocks = nn.ModuleList(InPlaceBlock() for _ in range(layers))


class Tied(Chain):
    """The first and the last stage have one weight; in a V they are on one rank."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight


class Outputs(Chain):
    """No loss: a dict of values, one of them from an early stage."""

    def forward(self, x: torch.Tensor) -> Any:
        first = self.blocks[0](self.embedding(x))
        hidden = first
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return {"early": first, "late": hidden, "sum": hidden.sum()}


def make(kind: Callable[[int], nn.Module], layers: int) -> nn.Module:
    """A model with the same weights in every process."""
    torch.manual_seed(layers)
    return kind(layers)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def wrap(model: nn.Module, microbatches: int, **arguments: Any) -> NxDPPModel:
    return NxDPPModel(model, transformer_layer_cls=Block, num_microbatches=microbatches, **arguments)


def v_schedule(ranks: int, microbatches: int) -> list[list[str]]:
    """ZB-V with full backwards in the place of its input-gradients, as a user would write it."""
    return [
        [
            str(action._replace(kind=ActionKind.BACKWARD) if action.kind is ActionKind.INPUT_GRADIENT else action)
            for action in actions
            if action.kind is not ActionKind.WEIGHT_GRADIENT
        ]
        for actions in FAMILIES["zb-v"].build(ranks, microbatches)
    ]


def train_both(wrapped: NxDPPModel, whole: nn.Module, microbatches: int, seed: int = 0) -> Any:
    """One step of each with two rows a microbatch; the result of ``run_train``, and the losses of one process."""
    x = rows(2 * microbatches, seed)
    result = wrapped.run_train(x=x)
    losses = []
    for part in x.chunk(microbatches):
        loss = whole(part)
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return result, losses


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that stays whole."""
    return copy.deepcopy(model)
