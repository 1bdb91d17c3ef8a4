"""Where the thread that computes spends a microbatch, where stages compute next to nothing: 1F1B on 4 ranks.

    OMP_NUM_THREADS=1 python benchmarks/engine_profile.py

Prints the median wall time of a step of each rank, without the profiler, and the functions of rank 1 that took the most
time by themselves, by cProfile, which adds some µs to each call.
"""

import cProfile
import pstats
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402

from nxdpp import NxDPPModel, parallel_state  # noqa: E402
from tests.support.run_ranks import run_ranks  # noqa: E402

RANKS, PROFILED_RANK = 4, 1
HIDDEN = (4, 128, 256)
MICROBATCHES = 32
WARM_UP, STEPS = 8, 24
SHOWN = 16


class Scaling(nn.Module):
    """One multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape of ``x``."""
        return x * self.scale


class Stack(nn.Module):
    """A layer for each stage, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaling() for _ in range(RANKS))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean squared difference."""
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, target)


class Function(NamedTuple):
    """What a function took by itself of one microbatch."""

    microseconds: float
    calls: float
    name: str


def main() -> None:
    """Start the ranks, and print the table."""
    found = run_ranks(RANKS, run_rank, timeout=200)
    walls = ", ".join(f"{wall:,.0f}" for wall, _ in found)
    table = Table("µs a microbatch", "calls a microbatch", "function", title=f"wall by rank: {walls} µs a microbatch")
    for function in found[PROFILED_RANK][1]:
        table.add_row(f"{function.microseconds:.0f}", f"{function.calls:.1f}", function.name)
    Console().print(table)


def run_rank(rank: int) -> tuple[float, list[Function]]:
    """The wall microseconds a microbatch, and the functions that took the most; collective."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    model = NxDPPModel(
        Stack(), transformer_layer_cls=Scaling, num_microbatches=MICROBATCHES, output_loss_value_spec=True
    )
    shape = (MICROBATCHES * HIDDEN[0], *HIDDEN[1:])
    inputs = {"x": torch.ones(shape), "target": torch.zeros(shape)}
    walls = [timed_step(model, inputs, None) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    profiler = cProfile.Profile()
    for _ in range(STEPS):
        timed_step(model, inputs, profiler)
    return 1e6 * median(walls) / MICROBATCHES, slowest_functions(profiler)


def timed_step(model: NxDPPModel, inputs: dict[str, torch.Tensor], profiler: cProfile.Profile | None) -> float:
    """Seconds of a step that all ranks begin together."""
    for parameter in model.local_parameters():
        parameter.grad = None
    dist.barrier()
    start = time.perf_counter()
    if profiler is not None:
        profiler.enable()
    model.run_train(**inputs)
    if profiler is not None:
        profiler.disable()
    return time.perf_counter() - start


def slowest_functions(profiler: cProfile.Profile) -> list[Function]:
    """By the time that they took by themselves."""
    microbatches = STEPS * MICROBATCHES
    entries = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    functions = [
        Function(1e6 * own / microbatches, calls / microbatches, f"{Path(file).name}:{name}")
        for (file, _, name), (_, calls, own, _, _) in entries.items()
    ]
    return sorted(functions, reverse=True)[:SHOWN]


if __name__ == "__main__":
    main()
