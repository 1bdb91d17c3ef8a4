"""Zero1Optimizer behind a pipeline: steps of a tied Llama equal those of plain AdamW."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.support.models import make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

STEPS, MAX_NORM = 4, 0.5


class Result(NamedTuple):
    """Largest distances of this rank's parameters after the steps, norms, and bytes.

    ``averaged`` is the distance from AdamW whose gradients an all-reduce averages, with sums in the same order. ``one``
    is that from AdamW in one process, whose sums have another order.
    """

    averaged: float
    one: float
    norms: list[float]
    state: int
    parameters: int


def train(rank: int, clips: bool, **options: Any) -> Result:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    rate = {"lr": 1e-3, "weight_decay": 0.1, **options}
    replica = parallel_state.get_data_parallel_rank()
    model = make("tied_llama", layers=2)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2, use_zero1_optimizer=True)
    named = dict(wrapped.local_named_parameters())
    twins = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    for name, twin in twins.items():
        twin.__dict__.update(named[name].__dict__)
    optimizer = NeuronZero1Optimizer(named.items(), torch.optim.AdamW, grad_clipping=clips, max_norm=MAX_NORM, **rate)
    averaged, plain = torch.optim.AdamW(twins.values(), **rate), torch.optim.AdamW(whole.parameters(), **rate)
    norms = []
    for step in range(STEPS):
        batch = padded_batch(8, length=6, seed=step)
        wrapped.run_train(**{name: value.chunk(2)[replica] for name, value in batch.items()})
        for name, parameter in named.items():
            assert parameter.grad is not None
            twins[name].grad = mean = parameter.grad / 2
            dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        train_in_one_process(whole, batch, 4)
        if clips:
            clip_grad_norm(list(twins.values()), MAX_NORM)
            norms.append(torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM).item())
        for each in (optimizer, averaged, plain):
            each.step()
            each.zero_grad()
        if clips:
            assert optimizer.grad_norm is not None
            torch.testing.assert_close(optimizer.grad_norm.item(), norms[-1], rtol=1e-5, atol=0)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    state = sum(t.nbytes for _, _, state in optimizer.shards() for t in state.values() if t.dim())
    parallel_state.destroy_model_parallel()
    return Result(
        max(_distance(parameter, twins[name]) for name, parameter in named.items()),
        max(_distance(parameter, expected[name]) for name, parameter in named.items()),
        norms,
        state,
        sum(parameter.nbytes for parameter in named.values()),
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.detach() - other.detach()).abs().max().item()


def accumulate(rank: int) -> float:
    """Return the distance after steps of three batches each in ``no_sync()``, with a frozen first layer."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    replica = parallel_state.get_data_parallel_rank()
    model = make("tied_llama", layers=2)
    model.model.layers[0].requires_grad_(False)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2, use_zero1_optimizer=True)
    optimizer = Zero1Optimizer(wrapped.local_named_parameters(), torch.optim.SGD, lr=0.5, max_norm=MAX_NORM)
    plain = torch.optim.SGD(whole.parameters(), lr=0.5)
    for step in range(2):
        for part in range(3):
            batch = padded_batch(8, length=6, seed=3 * step + part)
            with wrapped.no_sync():
                wrapped.run_train(**{name: value.chunk(2)[replica] for name, value in batch.items()})
            train_in_one_process(whole, batch, 4)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad(set_to_none=bool(step))
    expected = dict(whole.named_parameters(remove_duplicate=False))
    parallel_state.destroy_model_parallel()
    return max(_distance(parameter, expected[name]) for name, parameter in wrapped.local_named_parameters())


def train_all(rank: int) -> tuple[Result, Result, float]:
    # AdamW divides a gradient by its size: the rounding of one near zero shows, the more so after clipping.
    return train(rank, clips=False), train(rank, clips=True, eps=1e-6), accumulate(rank)


@pytest.mark.cpu_only("attention on a device has another kernel, and a sum over microbatches rounds otherwise")
def test_a_tied_llama_on_two_stages_and_two_replicas() -> None:
    for unclipped, clipped, accumulated in run_ranks(4, train_all):
        assert accumulated < 1e-7
        assert unclipped.averaged == 0
        assert unclipped.one < 1e-6
        # The norm is a sum over pieces, and its last bit may be another.
        assert clipped.averaged < 1e-7
        assert clipped.one < 1e-6
        assert max(clipped.norms) > MAX_NORM
        # AdamW has two numbers for each parameter, of which a rank keeps half.
        assert abs(clipped.state - clipped.parameters) <= 32
