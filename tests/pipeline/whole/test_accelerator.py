"""Steps on an accelerator with CUDA's and NCCL's rules: the numbers of the CPU, and no wait of the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from nxdpp import GradScaler, NxDPPModel, fully_shard, parallel_state
from tests.support import fake_device
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
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


def masks() -> dict[str, torch.Tensor | None]:
    """No mask, one without padding, and one with padding; each may lead to another mask."""
    padded = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    padded[1::2, -2:] = 0
    return {"none": None, "whole": torch.ones_like(padded), "padded": padded}


def trained(model: NxDPPModel, optimizer: torch.optim.Optimizer, mask: torch.Tensor | None) -> Trained:
    """Losses and norms of steps, and the waits of the host in the last one until its end."""
    numbers: list[float] = []
    of_steps: list[dict[str, int]] = []
    for step in range(STEPS):
        ids = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + step) % 30
        inputs = {"input_ids": ids, "labels": ids} | ({} if mask is None else {"attention_mask": mask})
        with fake_device.host_waits() as waits:
            loss = model.run_train(**inputs)
            # The host may change its batch at once.
            ids.zero_()
        of_steps.append(waits)
        assert loss is not None
        numbers += [float(loss), float(model.clip_grad_norm_(1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, of_steps[-1]


def numbers_of(
    device: str, pipeline: int, name: str, change: Callable[[NxDPPModel], object], settings: dict[str, Any]
) -> dict[str, Trained]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, device=device, hang_timeout=100)
    found = {}
    for kind, mask in masks().items():
        torch.manual_seed(0)
        model = NxDPPModel(make(name).double(), num_microbatches=4, broadcast_and_average_loss=True, **settings)
        change(model)
        model.move_model_to_device()
        found[kind] = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), mask)
    parallel_state.destroy_model_parallel()
    return found


def keep(model: NxDPPModel) -> None:
    """Change nothing."""


def both(
    rank: int, pipeline: int, name: str, change: Callable[[NxDPPModel], object], settings: dict[str, Any]
) -> list[dict[str, Trained]]:
    fake_device.install()
    return [numbers_of(device, pipeline, name, change, settings) for device in ("cpu", "fake")]


@pytest.mark.parametrize(
    ("ranks", "pipeline", "name", "change", "settings"),
    [
        (2, 2, "llama", keep, {}),
        (2, 2, "tied_llama", keep, {"schedule": "zb-v"}),
        (2, 1, "llama", keep, {}),
        (2, 1, "llama", fully_shard, {}),
        (4, 2, "tied_llama", keep, {"schedule": "interleaved"}),
        (4, 4, "gpt2", keep, {"schedule": "zb-h1"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_numbers_are_those_of_the_cpu_and_the_host_runs_ahead(
    ranks: int, pipeline: int, name: str, change: Callable[[NxDPPModel], object], settings: dict[str, Any]
) -> None:
    for cpu, fake in run_ranks(ranks, both, pipeline, name, change, settings, timeout=200):
        for kind, (numbers, _) in cpu.items():
            found, waits = fake[kind]
            assert found == pytest.approx(numbers, rel=1e-9), kind
            assert waits == {}, kind


def of_dynamic_rope(rank: int, most: int) -> list[Trained]:
    """Numbers on both devices of a model that asks whether a position is beyond the ``most`` of its rotary table."""
    fake_device.install()
    found = []
    for device in ("cpu", "fake"):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device, hang_timeout=100)
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
        module = make("llama", max_position_embeddings=most, rope_parameters=rope).double()
        model = NxDPPModel(module, num_microbatches=4, broadcast_and_average_loss=True)
        model.move_model_to_device()
        found.append(trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), None))
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("most", [LENGTH // 2, LENGTH, 2 * LENGTH])
def test_the_longest_position_is_asked_of_the_host(most: int) -> None:
    for (numbers, _), (found, waits) in run_ranks(2, of_dynamic_rope, most):
        assert found == pytest.approx(numbers, rel=1e-6)
        assert waits == {}


def left_on_the_cpu(rank: int, pipeline: int) -> str:
    """The error of a model that was not moved; other tests follow the remedy."""
    fake_device.install()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, hang_timeout=100)
    torch.manual_seed(0)
    model = NxDPPModel(make("llama").double(), num_microbatches=4, broadcast_and_average_loss=True)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 30
    with pytest.raises(RuntimeError) as caught:
        model.run_train(input_ids=ids, labels=ids)
    parallel_state.destroy_model_parallel()
    return str(caught.value)


@pytest.mark.parametrize("pipeline", [2, 1])
def test_a_model_that_was_not_moved_is_told_so(pipeline: int) -> None:
    for error in run_ranks(2, left_on_the_cpu, pipeline):
        assert error.startswith(
            "the model is on cpu, and the ranks exchange tensors on fake:0, over fccl: call model.move"
        )


def scaled(rank: int) -> tuple[list[float], list[float]]:
    """Losses with a scaled loss on the CPU, and where all tensors are made on the accelerator."""
    fake_device.install()
    found: list[list[float]] = []
    for device in ("cpu", "fake"):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device, hang_timeout=100)
        torch.manual_seed(0)
        module = make("llama").double()
        torch.set_default_device(None if device == "cpu" else "fake")
        scaler = GradScaler(device, init_scale=8.0)
        model = NxDPPModel(module, num_microbatches=4, broadcast_and_average_loss=True, grad_scaler=scaler)
        model.move_model_to_device()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found.append([])
        for step in range(STEPS):
            ids = (torch.arange(ROWS * LENGTH, device="cpu").view(ROWS, LENGTH) + step) % 30
            loss = model.run_train(input_ids=ids, labels=ids)
            assert loss is not None
            found[-1].append(float(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.set_default_device(None)
        parallel_state.destroy_model_parallel()
    return found[0], found[1]


def test_a_scaled_loss_where_all_tensors_are_made_on_the_accelerator() -> None:
    for cpu, fake in run_ranks(2, scaled):
        assert fake == pytest.approx(cpu, rel=1e-9)


def evaluated(rank: int) -> list[list[float]]:
    """Losses of evaluations without gradients and in inference mode, on the CPU and on the accelerator."""
    fake_device.install()
    found: list[list[float]] = []
    for device in ("cpu", "fake"):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device, hang_timeout=100)
        torch.manual_seed(0)
        model = NxDPPModel(make("llama").double(), num_microbatches=4, broadcast_and_average_loss=True)
        model.move_model_to_device()
        ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 30
        found.append([])
        for mask in masks().values():
            inputs = {"input_ids": ids, "labels": ids} | ({} if mask is None else {"attention_mask": mask})
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    loss = model.run_eval(**inputs)
                assert isinstance(loss, torch.Tensor)
                found[-1].append(float(loss))
        parallel_state.destroy_model_parallel()
    return found


def test_evaluations_are_those_of_the_cpu_in_inference_mode_too() -> None:
    for cpu, fake in run_ranks(2, evaluated):
        assert fake == pytest.approx(cpu, rel=1e-9)


def offloaded(rank: int, shard_size: int | None, of_caller: bool) -> list[list[float]]:
    """Numbers of rows in host memory; where the caller has a world of both kinds, of torch's collectives too."""
    fake_device.install()
    found: list[list[float]] = []
    for device in ("cpu", "fake"):
        if of_caller:
            dist.init_process_group("cpu:gloo,fake:fccl")
        parallel_state.initialize_model_parallel(device=device, data_parallel_shard_size=shard_size, hang_timeout=100)
        torch.manual_seed(0)
        model = NxDPPModel(make("tied_llama").double(), num_microbatches=2, broadcast_and_average_loss=True)
        fully_shard(model, offload_policy=CPUOffloadPolicy(device != "cpu"))
        model.move_model_to_device()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found.append(trained(model, optimizer, None)[0])
        first = next(model.parameters())
        assert isinstance(first, DTensor)
        assert first.device.type == "cpu"
        if of_caller:
            found[-1].append(float(first.full_tensor().sum()))
        parallel_state.destroy_model_parallel()
        if of_caller:
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("ranks", "shard_size", "of_caller"), [(2, None, False), (2, None, True), (4, 2, False)])
def test_rows_in_host_memory(ranks: int, shard_size: int | None, of_caller: bool) -> None:
    for cpu, fake in run_ranks(ranks, offloaded, shard_size, of_caller):
        assert fake == pytest.approx(cpu, rel=1e-9)


def autocast(rank: int, pipeline: int, name: str) -> tuple[float, float, dict[str, float | None]]:
    """Losses of a step in half precision and of plain torch on the same device, and the gradients that differ."""
    fake_device.install()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, device="fake", hang_timeout=100)
    batch = padded_batch(ROWS)
    model = NxDPPModel(make(name), num_microbatches=4, broadcast_and_average_loss=True)
    model.move_model_to_device()
    whole = reference(make(name)).to("fake")
    # torch makes new parameters on a type of another package, one for each name.
    whole.tie_weights()
    with torch.autocast("fake", dtype=torch.bfloat16):
        loss = model.run_train(**batch)
        plain = train_in_one_process(whole, {key: value.to("fake") for key, value in batch.items()}, 4)
    assert loss is not None
    found = float(loss), float(torch.stack(plain).mean()), gradient_differences(model, whole)
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(
    ("pipeline", "name"), [(1, "llama"), (1, "tied_llama"), (1, "gpt2"), (1, "mixtral"), (2, "llama"), (2, "mixtral")]
)
def test_autocast_gives_the_bits_of_plain_torch_on_the_device(pipeline: int, name: str) -> None:
    for loss, plain, differences in run_ranks(pipeline, autocast, pipeline, name):
        assert loss == plain
        assert differences == {}
