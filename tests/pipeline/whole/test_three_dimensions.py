"""Tensor x pipeline x data parallelism with and without sequence parallelism: the training of one process."""

from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from tests.support.local_slice import local_slice
from tests.support.models import make
from tests.support.run_ranks import run_ranks

STEPS, BATCH, MICROBATCHES, LENGTH, MAX_NORM = 4, 8, 2, 8, 0.5
CASES = [(False, "1f1b"), (True, "zb-v")]
"""Sequence parallelism and schedule."""


class Training(NamedTuple):
    """Loss and norm of each step, and the parameters afterwards."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def model() -> LlamaForCausalLM:
    # In float64: AdamW divides by small numbers, so the roundings of a device's kernels would grow.
    made: LlamaForCausalLM = make("llama", hidden_size=16, intermediate_size=24, num_key_value_heads=2).double()
    return made


def batch(step: int) -> torch.Tensor:
    return torch.randint(3, 61, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def optimizer_of(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train_whole() -> Training:
    whole = model()
    optimizer = optimizer_of(list(whole.parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        loss = whole(input_ids=batch(step), labels=batch(step), use_cache=False).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Training(losses, norms, {name: p.detach() for name, p in whole.named_parameters()})


def own_part(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    dim = getattr(parameter, "partition_dim", -1)
    return whole if dim < 0 else local_slice(whole, dim, parallel_state.get_tensor_model_parallel_rank(), 2)


def train(rank: int, expected: Training) -> None:
    parallel_state.initialize_model_parallel(2, 2)
    assert parallel_state.get_data_parallel_size() == 2
    for sequence, schedule in CASES:
        wrapped = NxDPPModel(
            tensor_parallelize(model(), sequence_parallel=sequence),
            num_microbatches=MICROBATCHES,
            schedule=schedule,
            broadcast_and_average_loss=True,
        )
        optimizer = optimizer_of(list(wrapped.local_parameters()))
        losses, norms = [], []
        for step in range(STEPS):
            ids = batch(step).chunk(2)[parallel_state.get_data_parallel_rank()]
            loss = wrapped.run_train(input_ids=ids, labels=ids)
            assert isinstance(loss, torch.Tensor)
            norms.append(wrapped.clip_grad_norm_(MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert min(norms) > MAX_NORM, "no step was clipped"
        torch.testing.assert_close(losses, expected.losses, rtol=0, atol=1e-5)
        torch.testing.assert_close(norms, expected.norms, rtol=1e-5, atol=0)
        for name, parameter in wrapped.local_named_parameters():
            theirs = own_part(parameter, expected.parameters[name])
            distance = (parameter.detach() - theirs).norm() / theirs.norm()
            assert distance < 1e-5, f"{schedule}: {name} differs by {distance:.1e}"


def test_each_schedule_equals_one_process() -> None:
    # Most of the time the ranks wait for each other: the limit is for a loaded machine.
    run_ranks(8, train, train_whole(), timeout=200.0)
