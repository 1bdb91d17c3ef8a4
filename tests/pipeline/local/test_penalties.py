"""Penalties over ``model.parameters()`` in a loss function are refused; the remedy has the gradients of one process."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks

WIDTH, FACTOR = 8, 0.01


class Layer(nn.Linear):
    """A layer."""


def penalty(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    return FACTOR * torch.stack([each.abs().sum() for each in parameters]).sum()


def means(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


class Penalties:
    """Loss functions over the parameters of ``model``, a pipelined one."""

    def __init__(self) -> None:
        self.model: Any = None
        self.before: list[nn.Parameter] = []

    def listed(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return means(output, target) + penalty(self.model.parameters())

    def by_name(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return means(output, target) + penalty(each for _, each in self.model.named_parameters())

    def listed_before(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return means(output, target) + penalty(self.before)

    def of_the_last_layer(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return means(output, target) + penalty([self.before[-2]])


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(WIDTH, WIDTH) for _ in range(4)])


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(8, WIDTH, generator=generator), torch.randint(WIDTH, (8,), generator=generator)
    return {"input": x, "target": target}


def step(rank: int, ranks: int, name: str, arguments: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    known = Penalties()
    loss_fn = getattr(known, name)
    model = NxDPPModel(build(), num_microbatches=4, transformer_layer_cls=Layer, loss_fn=loss_fn, **arguments)
    known.model, known.before = model, [*model.parameters()]
    model.run_train(**inputs())


OVER_BATCH = {"loss_over": "batch", "schedule": "gpipe"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("listed", {}),
    ("by_name", {}),
    ("listed_before", {}),
    ("listed", OVER_BATCH),
    ("listed_before", OVER_BATCH),
]


@pytest.mark.parametrize(("name", "arguments"), CASES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_penalty_over_a_part_is_refused(ranks: int, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"a penalty would be one of this part of the model.*after run_train"):
        run_ranks(ranks, step, ranks, name, arguments)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_penalty_of_one_layer_or_of_one_stage_is_right(ranks: int) -> None:
    run_ranks(ranks, step, ranks, "listed" if ranks == 1 else "of_the_last_layer", {})


def added(rank: int, ranks: int) -> tuple[float, float]:
    """The distances of loss and gradients to one process, with the penalty of each rank after the step."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    whole = build()
    model = NxDPPModel(*(build(), Layer, 4), loss_fn=means, broadcast_and_average_loss=True)
    loss = model.run_train(**inputs())
    own = penalty(model.parameters())
    own.backward()
    total = own.detach()
    torch.distributed.all_reduce(total)
    expected = means(whole(inputs()["input"]), inputs()["target"]) + penalty(whole.parameters())
    expected.backward()
    theirs = {name: each.grad for name, each in whole.named_parameters()}
    distances = []
    for name, each in model.named_parameters():
        gradient, other = each.grad, theirs[name]
        assert gradient is not None
        assert other is not None
        distances.append(float((gradient - other).abs().max()))
    return abs(float(loss + total - expected)), max(distances)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_penalty_of_each_rank_after_the_step_is_that_of_one_process(ranks: int) -> None:
    for loss, gradients in run_ranks(ranks, added, ranks):
        assert loss < 1e-5
        assert gradients < 1e-6
