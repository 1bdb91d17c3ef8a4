"""nxdpp next to torch's own on two ranks: DDP, FSDP2 and ``parallelize_module``, one step each in turn."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.layouts.job import Layout, Shape
from benchmarks.layouts.step import make
from benchmarks.layouts.traffic import Traffic
from nxdpp import parallel_state

RANKS = 2
WARM_UP = 2
PAIRS = {
    "data": (Layout(1, 1, 2), "DDP"),
    "ZeRO-1": (Layout(1, 1, 2, True), "FSDP2"),
    "tensor": (Layout(2, 1, 1), "parallelize_module"),
}
"""A layout of two ranks, and torch's own for the same work."""

Step = Callable[[], float]
"""A training step with AdamW, which returns this rank's loss."""


@dataclass(frozen=True)
class Timed:
    """A contender's seconds of each step on one rank, its last loss, and the bytes that it sends in a step."""

    name: str
    seconds: list[float]
    loss: float
    sent: float


def time_rank(rank: int, pair: str, shape: Shape, rounds: int) -> list[Timed]:
    """Time nxdpp and torch's own in turn, in reverse order in each second round; for ``run_ranks`` over two ranks."""
    torch.set_num_threads(1)
    layout, theirs = PAIRS[pair]
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    inputs = shape.inputs(parallel_state.get_data_parallel_rank())
    steps = {"nxdpp": _nxdpp(layout, shape, inputs), theirs: _TORCH[theirs](shape, inputs)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: [step() for _ in range(WARM_UP)][-1] for name, step in steps.items()}
    for number in range(rounds):
        for name in list(steps) if number % 2 else reversed(steps):
            dist.barrier()
            began = time.perf_counter()
            losses[name] = steps[name]()
            seconds[name].append(time.perf_counter() - began)
    sent = {}
    for name, step in steps.items():
        with Traffic({}) as traffic:
            step()
        sent[name] = float(sum(traffic.sent.values()))
    timed = [Timed(name, seconds[name], losses[name], sent[name]) for name in steps]
    parallel_state.destroy_model_parallel()
    return timed


def _nxdpp(layout: Layout, shape: Shape, inputs: dict[str, torch.Tensor]) -> Step:
    wrapped, optimizer = make(layout, shape)

    def step() -> float:
        optimizer.zero_grad()
        loss = wrapped.run_train(**inputs)
        optimizer.step()
        assert isinstance(loss, torch.Tensor), "each rank has the last stage"
        return loss.item()

    return step


def _ddp(shape: Shape, inputs: dict[str, torch.Tensor]) -> Step:
    model = DistributedDataParallel(shape.model(), gradient_as_bucket_view=True)
    return _accumulating(model, shape, inputs, lambda is_last: nullcontext() if is_last else model.no_sync())


def _fsdp2(shape: Shape, inputs: dict[str, torch.Tensor]) -> Step:
    """Parameters stay gathered within a step, so that each is gathered once, as with ZeRO-1."""
    model: Any = shape.model()
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    assert isinstance(model, FSDPModule), "fully_shard changes its class"
    sharded: Any = model

    def last_alone(is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        return nullcontext()

    return _accumulating(sharded, shape, inputs, last_alone)


def _parallelize_module(shape: Shape, inputs: dict[str, torch.Tensor]) -> Step:
    """Query, key and value share one DTensor as input, and so do gate and up: its gradient is summed once.

    The logits stay divided, as with ``tensor_parallelize``.
    """
    model = shape.model()
    column, row = ColwiseParallel, RowwiseParallel
    whole: Placement = Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": row(input_layouts=whole),
        "lm_head": column(output_layouts=Shard(-1), use_local_output=False),
    }
    states = {"hidden_states": whole}
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        plan[f"{layer}.self_attn"] = PrepareModuleInput(input_kwarg_layouts=states, desired_input_kwarg_layouts=states)
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{layer}.{name}"] = column()
        plan |= {f"{layer}.{name}": row() for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    return _accumulating(model, shape, inputs, lambda is_last: loss_parallel())


def _accumulating(model: nn.Module, shape: Shape, inputs: dict[str, torch.Tensor], sync: Callable[[bool], Any]) -> Step:
    """Return a step over the same microbatches; ``sync`` gives a context for each, told if it is the last."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    parts = [value.chunk(shape.microbatches) for value in inputs.values()]
    microbatches = [dict(zip(inputs, each, strict=True)) for each in zip(*parts, strict=True)]

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for number, microbatch in enumerate(microbatches):
            with sync(number == shape.microbatches - 1):
                loss = model(**microbatch).loss / shape.microbatches
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


_TORCH = {"DDP": _ddp, "FSDP2": _fsdp2, "parallelize_module": _parallelize_module}
