"""Zero1Optimizer under schedulers, options and gradients that are not finite: the steps of the plain optimizer."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp import parallel_state
from nxdpp.gradients.optimizer import sharded_bucket
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.gradients.optimizer.test_zero1 import assert_same, make, set_gradients, set_means
from tests.support.run_ranks import run_ranks


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


def parts_before_the_reduction(rank: int) -> None:
    optimizer = Zero1Optimizer(make(), torch.optim.AdamW, grad_clipping=False, lr=0.1)
    for early in (optimizer.gradient_norm, lambda: optimizer.scale_gradients(2.0), lambda: optimizer.clip_gradients(1)):
        with pytest.raises(RuntimeError, match=r"not reduced yet: call reduce_gradients\(\) first"):
            early()


CASES: list[Callable[[int], None]] = [
    frozen_for_a_step,
    other_options,
    messages,
    parts_before_the_reduction,
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
