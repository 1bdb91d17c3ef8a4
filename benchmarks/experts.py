"""Overlap of the exchanges of tokens of experts over ranks, with layers and links that sleep, beside the simulation.

    torchrun --nproc-per-node 4 benchmarks/experts.py            # 2 pipeline ranks x 2 expert ranks, 4 minutes

A layer sleeps for its attention, its experts and its shared experts. Each exchange takes a time of its own on a link
that carries one after the other; the tokens really travel, over gloo. Two overlaps are measured, each without and with
it, a step in turn: the pairs of DualPipeV, and the shared experts under 1F1B. "Simulated" is the makespan of
``schedules.execution``, which knows nothing of the time of a call in Python.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.report import markdown_table
from nxdpp import NxDPPModel, expert_parallelize, parallel_state
from nxdpp.experts import shared as shared_experts
from nxdpp.experts import tokens
from nxdpp.experts.participant import Experts as ExpertsOfSteps
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.execution import Times, Turns, run_in_order
from nxdpp.schedules.lowering.additions import TOKENS, add

RANKS, LAYERS_A_STAGE, MICROBATCHES, STEPS = 2, 2, 8, 3
HIDDEN, TOKENS_A_MICROBATCH = 8, 16
# Seconds of a forward; a backward takes twice as long, an exchange the same.
ATTENTION, EXPERTS, SHARED, EXCHANGE = 0.032, 0.040, 0.024, 0.048
_COLUMNS = ("schedule", "overlap", "measured, ms", "simulated, ms", "measured / simulated")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def sleep(given: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return ``given`` after ``seconds``; its gradient takes twice as long."""
    slept: torch.Tensor = _Sleep.apply(given, seconds)  # type: ignore[no-untyped-call]
    return slept


class Experts(nn.Module):
    """Two experts that sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(RANKS, HIDDEN, 1))
        self.down_proj = nn.Parameter(torch.ones(RANKS, HIDDEN, 1))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Scale the tokens."""
        return sleep(hidden * (self.gate_up_proj * self.down_proj).view(-1, HIDDEN)[0], EXPERTS) * weights.sum(
            -1, keepdim=True
        )


class Shared(nn.Module):
    """A shared expert that sleeps."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``hidden``."""
        return sleep(hidden, SHARED)


class Block(nn.Module):
    """Experts, then the shared one, as types of transformers have them."""

    def __init__(self, has_shared: bool) -> None:
        super().__init__()
        self.experts = Experts()
        self.shared_experts = Shared() if has_shared else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give each expert as many tokens."""
        index = torch.arange(hidden.shape[0]).unsqueeze(1) % RANKS
        found: torch.Tensor = self.experts(hidden, index, torch.ones(hidden.shape[0], 1))
        return found if self.shared_experts is None else found + self.shared_experts(hidden)


class Layer(nn.Module):
    """Attention that sleeps, and a block of experts."""

    def __init__(self, has_shared: bool) -> None:
        super().__init__()
        self.block = Block(has_shared)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``hidden`` and what the block makes of it."""
        rows = sleep(hidden, ATTENTION).flatten(0, 1)
        return hidden + self.block(rows).view_as(hidden)


class Model(nn.Module):
    """Layers, and the mean as loss."""

    def __init__(self, layers: int, has_shared: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList(Layer(has_shared) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``hidden`` (rows, tokens, H)."""
        hidden = hidden * self.scale
        for each in self.layers:
            hidden = each(hidden)
        return hidden.mean()


@contextmanager
def slow_link() -> Iterator[None]:
    """Let each exchange of tokens take its time, one after the other; their numbers travel at once."""
    begin, free = tokens._Exchange.begin, [0.0]

    def begin_slowly(self: Any, rows: torch.Tensor, of_backward: bool = False) -> None:
        begin(self, rows, of_backward)
        if not rows.is_floating_point():
            return
        free[0] = there = max(free[0], time.perf_counter()) + EXCHANGE
        wait = self._came

        def came() -> torch.Tensor:
            rows = wait()
            time.sleep(max(0.0, there - time.perf_counter()))
            return rows

        self._came = came

    tokens._Exchange.begin = begin_slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        tokens._Exchange.begin = begin  # type: ignore[method-assign]


def turns(shared: float) -> tuple[Turns, Turns]:
    """Return the turns of a forward and of a backward of a stage, with ``shared`` seconds between leave and arrival."""
    # A forward hands over for the numbers of tokens too.
    of_layer = [(ATTENTION, 0.0), (0.0, max(EXCHANGE, shared)), (EXPERTS, EXCHANGE)]
    back = [(0.0, EXCHANGE), (2 * EXPERTS, max(EXCHANGE, 2 * shared)), (2 * ATTENTION, 0.0)]
    return of_layer * LAYERS_A_STAGE, back * LAYERS_A_STAGE


def simulated(schedule: ChosenSchedule, overlaps_pairs: bool, shared: float, ahead: bool) -> float:
    """Return the seconds of the schedule."""
    stages = RANKS * schedule.placement.chunks
    forward, backward = turns(shared if ahead else 0.0)
    behind = 0.0 if ahead else LAYERS_A_STAGE * shared
    longer = [sum(map(sum, each)) + times * behind for times, each in ((1, forward), (2, backward))]
    each, none = [[seconds] * stages for seconds in longer], [0.0] * stages
    times = Times(each[0], each[1], none, none, tokens=([forward] * stages, [backward] * stages))
    actions = [add(each, TOKENS) if overlaps_pairs else each for each in schedule.training]
    return max(run_in_order(actions, stages, MICROBATCHES, times).clocks)


def measured(schedule: str, has_shared: bool, switch: Callable[[bool, NxDPPModel], None]) -> list[float]:
    """Return the median seconds of steps without the overlap and with it."""
    chunks = ChosenSchedule(schedule, RANKS, MICROBATCHES, 1).placement.chunks
    models = []
    for is_on in (False, True):
        model = Model(RANKS * chunks * LAYERS_A_STAGE, has_shared)
        model = NxDPPModel(
            expert_parallelize(model),
            transformer_layer_cls=Layer,
            num_microbatches=MICROBATCHES,
            schedule=schedule,
            pipeline_cuts=[f"layers.{at * LAYERS_A_STAGE - 1}" for at in range(1, RANKS * chunks)],
        )
        switch(is_on, model)
        models.append(model)
    batch = {"hidden": torch.ones(MICROBATCHES, TOKENS_A_MICROBATCH, HIDDEN, requires_grad=False)}
    seconds: list[list[float]] = [[], []]
    for step in range(STEPS + 2):
        for is_on, model in enumerate(models):
            switch(bool(is_on), model)
            dist.barrier()
            start = time.perf_counter()
            model.run_train(**batch)
            dist.barrier()
            if step > 1:
                seconds[is_on].append(time.perf_counter() - start)
    return [statistics.median(each) for each in seconds]


def switch_pairs(is_on: bool, model: NxDPPModel) -> None:
    """Let the two actions of a pair run one after the other, or at once."""
    for each in model.steps.participants.all:
        if isinstance(each, ExpertsOfSteps):
            each.additions = TOKENS if is_on else ()


def switch_shared(is_on: bool, model: NxDPPModel) -> None:
    """Let shared experts run behind the others, or ahead."""
    for module in model.local_modules():
        if isinstance(module, shared_experts.SharedExperts) and not is_on:
            shared_experts._ahead[module] = False


def rows() -> list[Sequence[str]]:
    """Measure and simulate the two overlaps."""
    found: list[Sequence[str]] = []
    for schedule, has_shared, name, switch in (
        ("dualpipe-v", False, "a forward and a backward", switch_pairs),
        ("1f1b", True, "the shared expert", switch_shared),
    ):
        chosen = ChosenSchedule(schedule, RANKS, MICROBATCHES, 1)
        for is_on, seconds in enumerate(measured(schedule, has_shared, switch)):
            expected = simulated(chosen, bool(is_on) and not has_shared, SHARED if has_shared else 0.0, bool(is_on))
            figures = f"{1e3 * seconds:.0f}", f"{1e3 * expected:.0f}", f"{seconds / expected:.3f}"
            found.append((schedule, name if is_on else "none", *figures))
    return found


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=RANKS, expert_model_parallel_size=RANKS, backend="gloo"
    )
    with slow_link():
        found = rows()
    if dist.get_rank() == 0:
        print(markdown_table(_COLUMNS, found, _COLUMNS[:2]))
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
