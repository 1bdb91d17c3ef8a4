"""Zero1Optimizer under schedulers, options and gradients that are not finite: the steps of the plain optimizer."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from nxdpp import parallel_state
from nxdpp.optimizer import Zero1Optimizer
from tests.optimizer.test_zero1 import assert_same, make, set_gradients, set_means
from tests.support.run_ranks import run_ranks

STEPS = 5


def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, patience=0)


def in_sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [2])


def cyclic(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CyclicLR(optimizer, 0.01, 0.1)


def restarts(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingWarmRestarts(optimizer, 2)


SCHEDULERS: list[Callable[[torch.optim.Optimizer], LRScheduler]] = [plateau, in_sequence, cyclic, restarts]
OPTIONS: list[dict[str, Any]] = [
    {"lr": torch.tensor(0.01)},
    {"lr": 0.1, "maximize": True},
    {"lr": 0.1, "fused": True},
    {"lr": 0.1, "foreach": True},
]


def schedulers(rank: int) -> None:
    for kind in SCHEDULERS:
        ours, theirs = make(), make()
        optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, lr=0.1)
        plain = torch.optim.AdamW(theirs, lr=0.1)
        both = [kind(each) for each in (optimizer, plain)]
        for step in range(STEPS):
            set_gradients(ours, rank, step)
            set_means(theirs, step)
            optimizer.step()
            plain.step()
            for scheduler in both:
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(float(step))
                else:
                    scheduler.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] != 0.1
        assert_same(ours, theirs)


def options(rank: int) -> None:
    for given in OPTIONS:
        ours, theirs = make(), make()
        optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, **given)
        plain = torch.optim.AdamW(theirs, **given)
        for step in range(3):
            set_gradients(ours, rank, step)
            set_means(theirs, step)
            optimizer.step()
            plain.step()
        assert_same(ours, theirs)


def frozen_for_a_step(rank: int) -> None:
    """A parameter that is frozen and trained again keeps its state; one in another memory format keeps its order."""
    ours, theirs = make(), make()
    ours[6].data = ours[6].data.transpose(0, 2).contiguous().transpose(0, 2)
    assert not ours[6].is_contiguous()
    optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, lr=0.1)
    plain = torch.optim.AdamW(theirs, lr=0.1)
    for step in range(4):
        set_gradients(ours, rank, step)
        set_means(theirs, step)
        for parameters in (ours, theirs):
            parameters[3].requires_grad_(step != 1)
            parameters[4].requires_grad_(step != 1)
            if step == 1:
                parameters[3].grad = parameters[4].grad = None
        optimizer.step()
        plain.step()
    assert_same(ours, theirs)


def infinite_gradients(rank: int) -> None:
    for max_norm in (1.0, math.inf):
        ours, theirs = make(), make()
        optimizer = Zero1Optimizer(ours, torch.optim.SGD, max_norm=max_norm, lr=0.1)
        plain = torch.optim.SGD(theirs, lr=0.1)
        set_gradients(ours, rank, 0)
        set_means(theirs, 0)
        for parameter in (ours[4], theirs[4]):
            assert parameter.grad is not None
            parameter.grad[0] = math.inf
        # Infinity only measures, as in clip_grad_norm.
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm) if max_norm == 1.0 else torch.tensor(math.inf)
        optimizer.step()
        plain.step()
        assert optimizer.grad_norm == norm == math.inf
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        assert ours[0].isfinite().all()


def other_options(rank: int) -> None:
    # Below step(), which would end the ranks.
    for changed in ("lr", "max_norm"):
        optimizer = Zero1Optimizer(make(), torch.optim.SGD, lr=0.1)
        if changed == "lr":
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
        else:
            optimizer.max_norm = 1.0 + rank
        with pytest.raises(RuntimeError, match=r"different options in the groups of their Zero1Optimizer, such as lr"):
            optimizer._present_anywhere()
        # A tensor is not compared: that would wait for its device.
        optimizer = Zero1Optimizer(make(), torch.optim.SGD, lr=0.1, grad_clipping=False)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        optimizer._present_anywhere()


CASES: list[Callable[[int], None]] = [schedulers, options, frozen_for_a_step, infinite_gradients, other_options]


def run_cases(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    for case in CASES:
        case(rank)


def test_two_replicas_step_as_the_plain_optimizer() -> None:
    run_ranks(2, run_cases)


def test_parameters_are_added_or_none_is() -> None:
    parallel_state.initialize_model_parallel()
    try:
        first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = Zero1Optimizer([first], torch.optim.SGD)
        with pytest.raises(ValueError, match="a group has a parameter twice"):
            optimizer.add_param_group({"params": [second, second]})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [second]})
        assert len(optimizer.base_optimizer.param_groups) == len(optimizer.param_groups) == 2
    finally:
        parallel_state.destroy_model_parallel()
