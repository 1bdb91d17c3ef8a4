"""``partition="balanced"`` and ``"profiled"`` over ranks: equal cuts on all ranks, exact training."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.arguments import check_partition
from nxdpp.pipeline.config import PipelineConfig
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import (
    gradient_differences,
    llama,
    microbatches,
    padded_batch,
    reference,
    train_in_one_process,
)
from tests.support.run_ranks import run_ranks


def _heavy_head() -> Any:
    torch.manual_seed(1234)
    return llama(vocab_size=700)


def train_balanced(rank: int) -> tuple[list[str], dict[str, float | None]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model, batch = _heavy_head(), padded_batch(4)
    whole = reference(model)
    example = {name: value.to("meta") for name, value in microbatches(batch, 2)[0].items()}
    wrapped = NxDPPModel(model, num_microbatches=2, partition="balanced", partition_batch=example)
    wrapped.run_train(**batch)
    train_in_one_process(whole, batch, 2)
    return wrapped.pipeline_cuts, gradient_differences(wrapped, whole)


class Slow(nn.Module):
    """Linear layer that sleeps in its forward."""

    seconds = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        result: torch.Tensor = self.linear(x)
        return result


class Slower(Slow):
    seconds = 0.06


class Failing(Slow):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and dist.get_rank() == 0:
            raise RuntimeError("this device is broken")
        return super().forward(x)


class Sleepers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train_profiled(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    model, x = Sleepers(Slower(), Slow(), Slow(), Slow()), torch.rand(4, 4)
    whole = reference(model)
    # Other ranks would measure other times. They use those of rank 0.
    Slower.seconds, Slow.seconds = (0.06, 0.02) if rank == 0 else (0.0, 0.05)
    wrapped = NxDPPModel(model, Slow, partition="profiled", partition_batch={"x": torch.empty(4, 4, device="meta")})
    Slower.seconds = Slow.seconds = 0.0
    wrapped.run_train(x=x)
    whole(x).backward()
    assert gradient_differences(wrapped, whole) == {}
    with pytest.raises(RuntimeError, match="this device is broken"):
        NxDPPModel(Sleepers(Failing(), Slow()), Slow, partition="profiled", partition_batch={"x": x})
    with pytest.raises(ValueError, match="no cut over 2 stages fits into the limit"):
        NxDPPModel(
            Sleepers(Slow(), Slow()),
            Slow,
            partition="profiled",
            partition_batch={"x": x},
            partition_memory_limit=100,
        )
    return wrapped.pipeline_cuts


def test_all_ranks_use_the_measurement_of_rank_0() -> None:
    assert run_ranks(2, train_profiled) == [["layers.0"]] * 2


def test_layers_of_tensor_ranks_are_not_measured_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_size", lambda: 2)
    batch = {"x": torch.empty(4, 4, device="meta")}
    with pytest.raises(ValueError, match="over 2 tensor-parallel ranks do not run there alone"):
        PipelineConfig(Sleepers(Slow(), Slow()), Slow, partition="profiled", partition_batch=batch).check()


def limit_memory(rank: int) -> tuple[list[str], list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
    arguments: dict[str, Any] = {"partition": "balanced", "partition_batch": {"input_ids": ids, "labels": ids}}
    model = llama(8)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"limit of 1\.86e-09 GiB.*smallest one needs 0\.001\d* GiB on rank \d"):
        NxDPPModel(model, num_microbatches=4, partition_memory_limit=2, **arguments)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    limited = NxDPPModel(model, num_microbatches=4, partition_memory_limit=1_100_000, **arguments)
    # With one microbatch in flight a stage needs less memory.
    once = NxDPPModel(llama(8), num_microbatches=1, partition_memory_limit=1_100_000, **arguments)
    return once.pipeline_cuts, limited.pipeline_cuts


@pytest.mark.cpu_only("a device has memory for communicators too")
def test_cuts_follow_costs_and_memory() -> None:
    for (cuts, differences), limits in run_in_turn(2, train_balanced, limit_memory):
        assert cuts == ["model.layers.2"], "the stage with a heavy head has one layer"
        assert differences == {}
        # The first stage has two microbatches in flight: 1.14 MB of weights, their state and activations.
        assert limits == (["model.layers.3"], ["model.layers.2"])


BATCH = {"input_ids": torch.empty(1, 8, dtype=torch.int64, device="meta")}


@pytest.mark.parametrize(
    ("partition", "batch", "limit", "cuts", "message"),
    [
        ("balanced", None, None, None, "needs partition_batch"),
        ("balanced", {**BATCH, "use_cache": False}, None, None, r"other values: \['use_cache'\]"),
        ("balanced", BATCH, None, ["model.layers.0"], "pipeline_cuts exclude each other"),
        ("even", None, 10, None, "consider no memory"),
    ],
)
def test_contradicting_arguments(partition: str, batch: Any, limit: Any, cuts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_partition(partition, batch, limit, cuts)
