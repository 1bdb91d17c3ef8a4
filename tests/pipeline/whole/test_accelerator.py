"""Steps on an accelerator with CUDA's and NCCL's rules: the numbers of the CPU, and no wait of the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from nxdpp import GradScaler, NxDPPModel, fully_shard, parallel_state
from tests.pipeline.runtime.scheduled_models import wrap
from tests.pipeline.whole.test_missing_gradients import EndsInSomeSteps
from tests.support import fake_device
from tests.support.models import make
from tests.support.plain_models import WIDTH
from tests.support.run_ranks import run_ranks

REASON = fake_device.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.cpu_only("its ranks start the fake accelerator"),
]

STEPS = 3
ROWS, LENGTH = 8, 6


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    fake_device.built()


Trained = tuple[list[float], dict[str, int]]


@contextmanager
def started(device: str, pipeline: int, **arguments: Any) -> Iterator[None]:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline, device=device, hang_timeout=100, **arguments
    )
    torch.manual_seed(0)
    yield
    parallel_state.destroy_model_parallel()


def wrapped(module: Any, **settings: Any) -> NxDPPModel:
    return NxDPPModel(module.double(), num_microbatches=4, broadcast_and_average_loss=True, **settings)


def mask_of(kind: str) -> dict[str, torch.Tensor]:
    """No mask, one without padding, and one with padding; each may lead to another mask."""
    padded = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    if kind == "padded":
        padded[1::2, -2:] = 0
    return {} if kind == "none" else {"attention_mask": padded}


def trained(model: NxDPPModel, kind: str = "none") -> Trained:
    """Losses and norms of steps, and the waits of the host in the last one until its end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers: list[float] = []
    of_steps: list[dict[str, int]] = []
    for step in range(STEPS):
        ids = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + step) % 30
        with fake_device.host_waits() as waits:
            loss = model.run_train(input_ids=ids, labels=ids, **mask_of(kind))
            # The host may change its batch at once.
            ids.zero_()
        of_steps.append(waits)
        assert loss is not None
        numbers += [float(loss), float(model.clip_grad_norm_(1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, of_steps[-1]


def keep(model: NxDPPModel) -> None:
    """Change nothing."""


CASES: list[tuple[int, str, Callable[[NxDPPModel], object], dict[str, Any], str]] = [
    (2, "llama", keep, {}, "none"),
    (2, "tied_llama", keep, {"schedule": "zb-v"}, "padded"),
    (1, "llama", fully_shard, {}, "whole"),
]
"""Stages, model, change, settings and mask."""


def evaluated(model: NxDPPModel) -> list[float]:
    """Losses of evaluations without gradients and in inference mode."""
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 30
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = model.run_eval(input_ids=ids, labels=ids, **mask_of("padded"))
        assert isinstance(loss, torch.Tensor)
        found.append(float(loss))
    return found


def dynamic_rope() -> Any:
    """A model that asks whether a position is beyond those of its rotary table."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    return make("llama", max_position_embeddings=LENGTH // 2, rope_parameters=rope)


def both(rank: int) -> list[dict[str, Trained]]:
    fake_device.install()
    found: list[dict[str, Trained]] = []
    for device in ("cpu", "fake"):
        found.append({})
        for pipeline, name, change, settings, mask in CASES:
            with started(device, pipeline):
                model = wrapped(make(name), **settings)
                change(model)
                model.move_model_to_device()
                found[-1][f"{pipeline} {name} {settings}"] = trained(model, mask)
                if change is keep:
                    found[-1][f"{pipeline} {name}, evaluated"] = evaluated(model), {}
        with started(device, 2):
            model = wrapped(dynamic_rope())
            model.move_model_to_device()
            found[-1]["dynamic rope"] = trained(model)
        with started(device, 2):
            found[-1]["scaled"] = scaled(device), {}
        for of_caller in (False, True):
            found[-1][f"offloaded, {of_caller}"] = offloaded(device, of_caller), {}
        found[-1]["offloaded, tied over stages"] = offloaded(device, False, 2), {}
    return found


def scaled(device: str) -> list[float]:
    """Losses with a scaled loss, where all tensors are made on the device."""
    module = make("llama")
    torch.set_default_device(None if device == "cpu" else "fake")
    scaler = GradScaler(device, init_scale=8.0)
    model = wrapped(module, grad_scaler=scaler)
    model.move_model_to_device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        ids = (torch.arange(ROWS * LENGTH, device="cpu").view(ROWS, LENGTH) + step) % 30
        losses.append(float(model.run_train(input_ids=ids, labels=ids)))  # type: ignore[arg-type]  # a tensor
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.set_default_device(None)
    return losses


def offloaded(device: str, of_caller: bool, pipeline: int = 1) -> list[float]:
    """Numbers of shards in host memory; with those of torch's collectives, in a world of the caller on the device."""
    # One world of a caller in a process: another one would meet the addresses of the first in the store.
    starts_world = of_caller and device == "fake"
    if starts_world:
        dist.init_process_group("cpu:gloo,fake:fccl")
    with started(device, pipeline):
        model = wrapped(make("tied_llama"))
        fully_shard(model, offload_policy=CPUOffloadPolicy(device != "cpu"))
        model.move_model_to_device()
        numbers, _ = trained(model)
        first = next(model.parameters())
        assert isinstance(first, DTensor)
        assert first.device.type == "cpu"
        if of_caller:
            numbers.append(first.full_tensor().sum().item())
    if starts_world:
        dist.destroy_process_group()
    return numbers


def test_numbers_are_those_of_the_cpu_and_the_host_runs_ahead() -> None:
    for cpu, fake in run_ranks(2, both, timeout=200):
        for case, (numbers, _) in cpu.items():
            found, waits = fake[case]
            assert found == pytest.approx(numbers, rel=1e-6 if case == "dynamic rope" else 1e-9), case
            assert waits == {}, case


def left_on_the_cpu(rank: int) -> list[str]:
    """Errors of a model that was not moved, and of one that is moved back after a step, whose remedy is followed."""
    fake_device.install()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, hang_timeout=100)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 30
    model = wrapped(make("llama"))
    errors = []
    for move in (model.move_model_to_device, lambda: model.local_module.to("fake")):
        with pytest.raises(RuntimeError) as caught:
            model.run_train(input_ids=ids, labels=ids)
        errors.append(str(caught.value))
        move()
        model.run_train(input_ids=ids, labels=ids)
        model.local_module.to("cpu")
    return errors


def test_a_model_that_was_not_moved_is_told_so() -> None:
    for never, back in run_ranks(2, left_on_the_cpu):
        assert never.startswith(
            "the model is on cpu, and the ranks exchange tensors on fake:0, over fccl: call model.move"
        )
        assert back.startswith("the model is on cpu, and was on fake:0 in the steps before: move it with model.move")


def stops_to_depend(rank: int) -> None:
    fake_device.install()
    with started("fake", 2):
        model = EndsInSomeSteps(4)
        stages = wrap(model, 2)
        stages.move_model_to_device()
        for ends in (False, True):
            model.set_ends(ends)
            stages.run_train(x=torch.ones(4, WIDTH))


def test_a_gradient_that_is_missing_after_the_first_step_is_refused() -> None:
    message = "rank 1: .*the loss of this step does not depend on model_blocks_1, .* in the first step it did"
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        run_ranks(2, stops_to_depend)
