"""Step time and memory of a Llama: nxdpp, torch.distributed.pipelining and FSDP2, in alternation.

A step is the forward and backward of all microbatches under autocast, and AdamW. In ``pipeline`` the ranks are stages
of 1F1B, and with one rank a plain loop runs too; in ``shards`` they are replicas that divide the parameters.
"""

import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.comparison.contenders import Contender, Nxdpp, Torch
from benchmarks.comparison.job import Job
from benchmarks.comparison.llama import LlamaSize, llama_job
from benchmarks.first_hour.place import CPU, Found, Rank
from nxdpp import parallel_state
from nxdpp.devices import accelerator
from nxdpp.devices.kinds import device_of

PIPELINE, SHARDS = "pipeline", "shards"
CASES = [PIPELINE, SHARDS]
MOST_RANKS = 8
_WARM_UP, _STEPS = 3, 10
_LAYERS, _WIDTHS = 16, (2048, 1024, 512, 256)
_SHARE = 0.5
"""Share of the device's memory that parameters, gradients and optimizer state of all contenders may take."""
_CLOSE = 0.02
"""Difference of the losses of the first step that roundings of bfloat16 explain, relative."""


def run(rank: Rank, case: str) -> Found:
    """Time the contenders of a case."""
    # Deterministic kernels are slower, for all alike.
    torch.use_deterministic_algorithms(False)
    device = rank.begin(rank.count if case == PIPELINE else 1)
    try:
        job = llama_job(size_for(rank, device), device)
        contenders = _stages(rank, job) if case == PIPELINE else _replicas(rank, job)
        return _timed(contenders, device, 2 if rank.place.dry else _STEPS)
    finally:
        parallel_state.destroy_model_parallel()


def size_for(rank: Rank, device: torch.device) -> LlamaSize:
    """Return the largest size of which three contenders fit on the device."""
    microbatches = 4 * rank.count
    if rank.place.dry:
        return LlamaSize(32, rank.count, 4, 64, 16, microbatches, 1)
    memory = accelerator.total_memory(device)

    def bytes_of(hidden: int) -> int:
        parameters = 16 * _LAYERS * hidden**2 + 2 * 32000 * hidden
        return 3 * 16 * parameters // rank.count

    hidden = next((width for width in _WIDTHS if bytes_of(width) <= _SHARE * memory), _WIDTHS[-1])
    return LlamaSize(hidden, _LAYERS, max(4, hidden // 128), 32000, 2048, microbatches, 1)


class _Plain(Contender):
    """A loop over the microbatches in one process."""

    def __init__(self, name: str, job: Job) -> None:
        super().__init__(name, "")
        self._job = job
        self._model = job.make_model().to(job.first_input.device)

    def step(self) -> torch.Tensor | None:
        return self._job.run_in_one_process(self._model)

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._model.named_parameters()


class _Sharded(_Plain):
    """FSDP2 on each layer and on the model; it reduces the gradients once in a step.

    With ``keeps`` the parameters are gathered once in a step too, as nxdpp does, else for each microbatch.
    """

    def __init__(self, job: Job, keeps: bool) -> None:
        super().__init__("FSDP2", job)
        self._keeps = keeps
        mesh = parallel_state.get_device_mesh()["data"]
        for layer in self._model.modules():
            if isinstance(layer, job.layer_class):
                fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
        self._sharded: Any = fully_shard(self._model, mesh=mesh, reshard_after_forward=not keeps)

    def step(self) -> torch.Tensor | None:
        parts = self._job.first_input.chunk(self._job.microbatches)
        losses = []
        for part in parts:
            is_last = part is parts[-1]
            self._sharded.set_requires_gradient_sync(is_last)
            self._sharded.set_reshard_after_backward(is_last or not self._keeps)
            loss = self._sharded(input_ids=part, labels=part).loss / self._job.microbatches
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def _stages(rank: Rank, job: Job) -> dict[str, Contender]:
    alone: dict[str, Contender] = {"plain torch": _Plain("plain torch", job)} if rank.count == 1 else {}
    return {"torch.distributed.pipelining": Torch(job, "1f1b", 1), **alone, "nxdpp": Nxdpp(job, "1f1b", 1)}


def _replicas(rank: Rank, job: Job) -> dict[str, Contender]:
    ids = job.first_input.chunk(rank.count)[rank.number]
    own = replace(
        job, inputs={"input_ids": ids, "labels": ids}, first_input=ids, target=ids,
        microbatches=job.microbatches // rank.count,
    )  # fmt: skip
    return {
        "FSDP2": _Sharded(own, keeps=False),
        "FSDP2 gathered once": _Sharded(own, keeps=True),
        "nxdpp's shards": Nxdpp(own, "1f1b", 1, shards=True),
    }


def _timed(contenders: dict[str, Contender], device: torch.device, steps: int) -> Found:
    """Return seconds and bytes of each contender on this rank; each takes one step in turn."""
    optimizers = {
        name: torch.optim.AdamW([parameter for _, parameter in contender.parameters()], lr=1e-4)
        for name, contender in contenders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peaks, losses = dict.fromkeys(contenders, 0), {}
    own, counts = device_of(device), device.type != CPU
    for step in range(_WARM_UP + steps):
        for name in contenders if step % 2 else reversed(contenders):
            dist.barrier()
            own.synchronize()
            before = torch.accelerator.memory_allocated(device) if counts else 0
            if counts:
                torch.accelerator.reset_peak_memory_stats(device)
            began = time.perf_counter()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = contenders[name].step()
            optimizers[name].step()
            own.synchronize()
            seconds[name].append(time.perf_counter() - began)
            contenders[name].clear_gradients()
            peaks[name] = torch.accelerator.max_memory_allocated(device) - before if counts else 0
            if step == 0 and loss is not None:
                losses[name] = float(loss)
    figures = {
        name: {
            "seconds": statistics.median(taken[_WARM_UP:]),
            "quartiles": statistics.quantiles(taken[_WARM_UP:], n=4)[::2],
            "bytes_of_state": _state(contenders[name], optimizers[name]),
            "bytes_at_the_peak_beyond": peaks[name],
            "first_loss": losses.get(name),
        }
        for name, taken in seconds.items()
    }
    far = losses and max(losses.values()) - min(losses.values()) > _CLOSE * max(losses.values())
    return Found(figures, f"the losses of the first step differ: {losses}" if far else "")


def _state(contender: Contender, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and optimizer state on this rank."""
    tensors: list[torch.Tensor] = [parameter for _, parameter in contender.parameters()]
    for values in optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)
