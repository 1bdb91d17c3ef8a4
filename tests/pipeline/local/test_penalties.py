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


def step(rank: int, name: str, arguments: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    known = Penalties()
    loss_fn = getattr(known, name)
    model = NxDPPModel(build(), num_microbatches=4, transformer_layer_cls=Layer, loss_fn=loss_fn, **arguments)
    known.model, known.before = model, [*model.parameters()]
    model.run_train(**inputs())


@pytest.mark.parametrize(
    ("name", "arguments"), [("listed", {}), ("listed_before", {"loss_over": "batch", "schedule": "gpipe"})]
)
def test_a_penalty_over_a_part_is_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"a penalty would be one of this part of the model.*after run_train"):
        run_ranks(2, step, name, arguments)


def added(rank: int) -> tuple[float, float]:
    """The distances of loss and gradients to one process, with the penalty of each rank after the step."""
    step(rank, "of_the_last_layer", {})
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


def test_a_penalty_of_each_rank_after_the_step_is_that_of_one_process() -> None:
    for loss, gradients in run_ranks(2, added):
        assert loss < 1e-5
        assert gradients < 1e-6
