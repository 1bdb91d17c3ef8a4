"""Zero1Optimizer under schedulers, options and gradients that are not finite: the steps of the plain optimizer."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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

from nxdpp import declare_optimizer, parallel_state
from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer
from nxdpp.gradients.optimizer import sharded_bucket
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.gradients.optimizer.optimizers import Lion
from tests.gradients.optimizer.test_zero1 import assert_same, make, set_gradients, set_means
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


def frozen_with_a_gradient(rank: int) -> None:
    """A parameter frozen after a backward that no optimizer has stepped is stepped while it has the gradient."""
    ours, theirs = make(), make()
    set_gradients(ours, rank, 0)
    set_means(theirs, 0)
    for parameters in (ours, theirs):
        parameters[0].requires_grad_(False)
        parameters[1].requires_grad_(False).grad = None
    optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, lr=0.1)
    plain = torch.optim.AdamW(theirs, lr=0.1)
    for _ in range(2):
        optimizer.step()
        plain.step()
        assert_same(ours, theirs)
        optimizer.zero_grad()
        plain.zero_grad()


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


def messages(rank: int) -> None:
    """Gradients are reduce-scattered in buckets, and a master copy has half of a half parameter's elements."""
    parameters = [nn.Parameter(torch.ones(100 + each, dtype=torch.bfloat16)) for each in range(8)]
    optimizer = Zero1Optimizer(parameters, torch.optim.AdamW, lr=0.1, bucket_cap_mb=450 / 2**20)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    with (
        mock.patch.object(sharded_bucket, "_reduce_scatter", wraps=sharded_bucket._reduce_scatter) as reduced,
        mock.patch.object(sharded_bucket, "_all_gather", wraps=sharded_bucket._all_gather) as gathered,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as numbers,
    ):
        optimizer.step()
    whole = sum(parameter.numel() for parameter in parameters)
    # Two parameters in each bucket, and an element of padding in some.
    assert len(reduced.call_args_list) == len(gathered.call_args_list) == 4
    assert 0 <= sum(call.args[0].numel() for call in reduced.call_args_list) - whole // 2 <= 4
    # No gradient is among what all ranks reduce: positions, flags and a norm.
    assert all(call.args[0].numel() <= 16 for call in numbers.call_args_list)
    masters = [values for _, values, _ in optimizer.shards()]
    assert {values.dtype for values in masters} == {torch.float32}
    assert abs(sum(values.numel() for values in masters) - whole // 2) <= 4


def averaged_in_float32(rank: int) -> None:
    """``higher_cc_precision`` averages gradients of half precision in float32."""
    for is_higher in (False, True):
        parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        optimizer = NeuronZero1Optimizer(
            [parameter], torch.optim.SGD, lr=1.0, grad_clipping=False, higher_cc_precision=is_higher
        )
        # The mean, 1 + 2**-8, needs a bit more than bfloat16 has.
        parameter.grad = torch.full_like(parameter, 1 + rank * 2**-7)
        optimizer.step()
        (values,) = (-values for _, values, _ in optimizer.shards())
        assert torch.equal(values, torch.full_like(values, 1 + 2**-8 if is_higher else 1.0))


class Sending(torch.optim.SGD):
    """Averages what is averaged already, once more."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
        return super().step(closure)


def declared(rank: int) -> None:
    """A class that the program declares is stepped in parts, and its messages are refused."""
    for kind in (Lion, Sending):
        declare_optimizer(kind, looks_at="element")
    ours, theirs = make(), make()
    optimizer, plain = Zero1Optimizer(ours, Lion, grad_clipping=False, lr=0.1), Lion(theirs, lr=0.1)
    for step in range(3):
        set_gradients(ours, rank, step)
        set_means(theirs, step)
        optimizer.step()
        plain.step()
    assert_same(ours, theirs)
    sending = Zero1Optimizer(ours, Sending, lr=0.1)
    for piece in sending._ordered():
        piece.tensor.grad = torch.ones_like(piece.tensor)
    # Below step(), which would end the ranks.
    with pytest.raises(RuntimeError, match=r"Sending sends messages in its step, .*before c10d.allreduce_"):
        sending.base_optimizer.step()


CASES: list[Callable[[int], None]] = [
    schedulers,
    options,
    frozen_for_a_step,
    frozen_with_a_gradient,
    infinite_gradients,
    other_options,
    messages,
    averaged_in_float32,
    declared,
]


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
