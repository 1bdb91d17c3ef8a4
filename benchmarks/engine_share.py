"""The engine's own share of a steady step: microseconds an action outside stages and transport, by schedule family.

    python benchmarks/engine_share.py [--only zb1p] [--steps 50]

One process acts as a rank of 4 in the debug mode. Its engine runs with a transport whose messages have arrived when a
receive is posted. So nothing waits, and no other process takes the processor. The same stages, which compute next to
nothing, then run without an engine: ``forward`` of each stage's module, and autograd's engine from its output.

A column is the time of the engine's calls of one kind, less the plain run. An input-gradient and its weight-gradient
are compared with two runs of autograd's engine, for the received value and for the parameters: the column of split
backwards has both. A send is counted with the release that frees it. "An action" is the sum of the columns over a step
with the engine's loop over calls that do nothing, divided by the actions of the rank, sends and receives included. Each
call counts with the lower quartile over the steps, all measured in turn: what else runs on the machine only adds to it.

``way_of_a_step.py`` has the milliseconds of a step before and after the engine.
"""

import argparse
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch  # noqa: E402
from torch.autograd.graph import get_gradient_edge  # noqa: E402

from benchmarks.report import markdown_table, session_line  # noqa: E402
from benchmarks.steps_on_demand import WIDTH, ScaledLayer, ScaledStack  # noqa: E402
from nxdpp import NxDPPModel, parallel_state  # noqa: E402
from nxdpp.pipeline.loss.step_loss import StepLoss  # noqa: E402
from nxdpp.pipeline.p2p.layout import TensorLayout, ValueLayout, layout_of, tensor_layout  # noqa: E402
from nxdpp.pipeline.p2p.transport import Direction  # noqa: E402
from nxdpp.pipeline.runtime.engine import Engine  # noqa: E402
from nxdpp.pipeline.runtime.stage_channels import EngineConfig  # noqa: E402
from nxdpp.schedules.actions import Action, ActionKind  # noqa: E402
from nxdpp.schedules.chosen import ChosenSchedule  # noqa: E402
from nxdpp.schedules.families.registry import FAMILIES, find_family  # noqa: E402
from nxdpp.schedules.lowering.releases import RELEASE_OF, in_flight_limit, rank_program  # noqa: E402
from nxdpp.schedules.lowering.transport_rules import GLOO  # noqa: E402

RANKS, MICROBATCHES, ROWS = 4, 32, 4
KINDS = ("forward", "backward", "split backward", "receive", "send and release")
_KIND_OF = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "split backward",
    ActionKind.WEIGHT_GRADIENT: "split backward",
    ActionKind.RECEIVE_ACTIVATION: "receive",
    ActionKind.RECEIVE_GRADIENT: "receive",
    ActionKind.SEND_ACTIVATION: "send and release",
    ActionKind.SEND_GRADIENT: "send and release",
    ActionKind.RELEASE_ACTIVATION: "send and release",
    ActionKind.RELEASE_GRADIENT: "send and release",
}


class _Finished:
    def wait(self) -> None:
        """Return at once."""


class _Layouts(dict[str, ValueLayout]):
    """The layout of ``message``, for whatever name of a value."""

    def __init__(self, message: torch.Tensor) -> None:
        super().__init__(any=layout_of(message))

    def __missing__(self, name: str) -> ValueLayout:
        return self["any"]


class InstantTransport:
    """A transport whose messages, all equal to ``message`` of (rows, width), are there at once."""

    is_in_host_memory = True
    sent_bytes = 0

    def __init__(self, message: torch.Tensor) -> None:
        self._layouts = _Layouts(message.detach().requires_grad_())
        self._message = message
        self._finished = _Finished()

    def wait_for(self, peer: int) -> None:
        """Return nothing to show on the board."""

    def post_receive(
        self, layout: TensorLayout, source: int, direction: Direction, tag: int
    ) -> Callable[[], torch.Tensor]:
        """Return a function that returns the message."""
        return lambda: self._message

    def send(self, tensor: torch.Tensor, destination: int, direction: Direction, tag: int) -> Any:
        """Return a finished transfer."""
        return self._finished, tensor

    def finish(self) -> None:
        """Do nothing."""

    def send_object(self, value: Any, destination: int, tag: int, direction: Direction) -> None:
        """Do nothing."""

    def receive_object(self, source: int, tag: int, direction: Direction) -> Any:
        """Return the layouts of activations, or of gradients."""
        return self._layouts if direction is Direction.ACTIVATION else [tensor_layout(self._message)]


class Share(NamedTuple):
    """Microseconds of the engine itself: of one action in the mean, and of one action of each kind."""

    actions: int
    of_an_action: float
    of_kinds: dict[str, float]


def share_of(family: str, rank: int, steps: int) -> Share:
    """Return the engine's share on ``rank`` of 4; not collective, in the debug mode of ``rank``."""
    engine, actions, loss = _engine(family, rank)
    kinds = [_KIND_OF[action.kind] for action in engine._called_for]
    # By call, by kind of a plain run, and of the loop over calls that do nothing.
    of_calls: list[list[int]] = [[] for _ in kinds]
    of_plain: defaultdict[str, list[int]] = defaultdict(list)
    of_loop: list[int] = []
    empty: list[int] = []
    timed = [_timed(call, taken) for call, taken in zip(engine._calls, of_calls, strict=True)]
    nothing = [_nothing] * len(timed)
    for number in range(steps + 3):
        # In turn, so that all meet the same load of the machine.
        for kind, nanoseconds in _plain(engine, loss.microbatches[0]["x"]):
            of_plain[kind].append(nanoseconds)
        engine._calls = timed
        engine.run(loss)
        if number < 3:
            # No steady step.
            for taken in (*of_calls, *of_plain.values()):
                taken.clear()
        engine._calls = nothing
        _timed(lambda: engine.run(loss), of_loop)()
        _timed(_nothing, empty)()
    plain = {kind: _quartile(taken) for kind, taken in of_plain.items()}
    spent: defaultdict[str, float] = defaultdict(float)
    for kind, taken in zip(kinds, of_calls, strict=True):
        spent[kind] += _quartile(taken) - _quartile(empty)
    # A weight-gradient belongs to its input-gradient, and a release to its send.
    actions = [action for action in actions if action.kind not in RELEASE_OF.values()]
    number_of = Counter(_KIND_OF[action.kind] for action in actions if action.kind is not ActionKind.WEIGHT_GRADIENT)
    shares = {kind: spent[kind] / number - plain.get(kind, 0.0) for kind, number in number_of.items()}
    own = sum(shares[kind] * number for kind, number in number_of.items()) + _quartile(of_loop)
    return Share(len(actions), own / len(actions), shares)


def _engine(family: str, rank: int) -> tuple[Engine, Sequence[Action], StepLoss]:
    """An engine of ``rank`` without other ranks, its actions, and the inputs of a step."""
    torch.manual_seed(0)
    chunks = find_family(family).default_chunks
    stack = ScaledStack(RANKS * chunks)
    model = NxDPPModel(stack, ScaledLayer, MICROBATCHES, virtual_pipeline_size=chunks, schedule=family)
    message = torch.randn(ROWS, WIDTH)
    microbatches = [{"x": message, "target": message} for _ in range(MICROBATCHES)]
    programs = model.steps.programs
    program = programs.program(programs.cut_graph(microbatches[0], True), "loss")
    schedule = ChosenSchedule(family, RANKS, MICROBATCHES, chunks)
    actions = rank_program(schedule.training, rank, program.edges, GLOO, True)
    limit = in_flight_limit(schedule.training, program.edges, GLOO)
    config = EngineConfig(schedule.placement, rank, MICROBATCHES, torch.device("cpu"), True, False, limit)
    transport: Any = InstantTransport(message)
    return Engine(config, [program.stages], transport, actions), actions, StepLoss(microbatches)


def _plain(engine: Engine, message: torch.Tensor) -> Iterator[tuple[str, int]]:
    """Nanoseconds of a forward and of each kind of backward of each stage, without the engine."""
    run = torch.autograd.Variable._execution_engine.run_backward
    for runner in engine._runners.values():
        module, plan = runner.program.module, runner.program.plan
        weights = tuple(map(get_gradient_edge, module.parameters()))
        for kind in ("backward", "split backward") * (MICROBATCHES // 2):
            received = [message.detach().requires_grad_() for _ in plan.received]
            start = time.perf_counter_ns()
            (value, *_) = module.forward(*[message for _ in plan.inputs], *received)
            middle = time.perf_counter_ns()
            roots, gradients = (value,), (torch.ones_like(value),)
            if kind == "backward":
                run(roots, gradients, False, False, (), True, True)
            else:
                if received:
                    run(roots, gradients, True, False, tuple(map(get_gradient_edge, received)), True, False)
                run(roots, gradients, False, False, weights, True, True)
            end = time.perf_counter_ns()
            yield "forward", middle - start
            yield kind, end - middle


def _timed(call: Callable[[], object], taken: list[int]) -> Callable[[], None]:
    """Return ``call`` with its nanoseconds appended to ``taken``."""
    clock = time.perf_counter_ns

    def run() -> None:
        start = clock()
        call()
        taken.append(clock() - start)

    return run


def _nothing() -> None:
    pass


def _quartile(taken: Sequence[int]) -> float:
    """The lower quartile of nanoseconds, in microseconds."""
    return statistics.quantiles(taken, n=4)[0] / 1e3


def main() -> None:
    """Print one table in Markdown: a row for each family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=FAMILIES, action="append", help="family, may be repeated; all by default")
    parser.add_argument("--rank", type=int, default=1, help=f"the rank of {RANKS} that this process acts as")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parallel_state.initialize_debug(pipeline_model_parallel_rank=given.rank, pipeline_model_parallel_size=RANKS)
    rows = []
    for family in given.only or FAMILIES:
        share = share_of(family, given.rank, given.steps)
        of_kinds = [f"{share.of_kinds[kind]:.1f}" if kind in share.of_kinds else "" for kind in KINDS]
        rows.append([family, f"{share.actions}", f"{share.of_an_action:.1f}", *of_kinds])
    print(session_line(), "Microseconds, less is better.\n")
    print(markdown_table(("family", "actions of a step", "an action", *KINDS), rows, left=("family",)))


if __name__ == "__main__":
    main()
