"""Calls of the model are those that the engine makes, in a first step and in later ones."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from nxdpp import parallel_state
from nxdpp.pipeline.p2p.channel import RemoteChannel
from nxdpp.pipeline.p2p.transport import Direction
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.transport_rules import GLOO, NCCL, TransportRules
from tests.pipeline.runtime.scheduled_models import Skips, make, rows, wrap
from tests.schedules.transport_model.rank_calls import CallKind, RankCalls
from tests.schedules.transport_model.verdict import programs
from tests.support.nccl_rules import use_nccl_rules
from tests.support.run_ranks import run_ranks

RANKS, MICROBATCHES = 3, 5
# Kind of a call, and its transfer, the stages of its metadata, or the microbatch that it computes.
Noted = tuple[str, Any]


def _noted_calls(calls: list[Noted]) -> None:
    """Note what the engine asks of channels and stages, in the process of a rank."""

    def noting(owner: type, name: str, note: Callable[..., Noted | None]) -> None:
        plain = getattr(owner, name)

        def noted(self: Any, *arguments: Any) -> Any:
            entry = note(self, *arguments)
            result = plain(self, *arguments)
            if entry is not None:
                calls.append(entry)
            return result

        setattr(owner, name, noted)

    def receive_of(channel: RemoteChannel, direction: Direction, microbatch: int) -> Action:
        source, destination = channel.boundary.source, channel.boundary.destination
        if direction is Direction.ACTIVATION:
            return Action(destination, ActionKind.RECEIVE_ACTIVATION, microbatch, source)
        return Action(source, ActionKind.RECEIVE_GRADIENT, microbatch, destination)

    noting(RemoteChannel, "post_now", lambda c, way, mb: ("POST", receive_of(c, way, mb)))
    noting(RemoteChannel, "give", lambda c, way, mb, _: ("SEND", receive_of(c, way, mb)))
    noting(
        RemoteChannel,
        "receive_metadata",
        lambda c: None if c.boundary.layouts else ("WAIT_METADATA", (c.boundary.source, c.boundary.destination)),
    )
    noting(RemoteChannel, "send_metadata", lambda c: ("SEND_METADATA", (c.boundary.source, c.boundary.destination)))
    # The last calls before a forward and before a backward.
    noting(StageRunner, "_receive", lambda _, mb, __: ("COMPUTE", mb))
    noting(StageRunner, "_roots", lambda _, __, mb: ("COMPUTE", mb))


def _train(rank: int, name: str, rules: TransportRules) -> list[Any]:
    """Return the actions and edges of the engine, and the calls of a first and a second step."""
    if rules == NCCL:
        use_nccl_rules()
    calls: list[Noted] = []
    compiled: list[Any] = []
    _noted_calls(calls)
    compile_list = Engine._compile

    def compiling(self: Engine, actions: Sequence[Action]) -> Any:
        compiled.append(list(actions))
        return compile_list(self, actions)

    Engine._compile = compiling  # type: ignore[method-assign]
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    layers = RANKS * FAMILIES[name].default_chunks
    wrapped = wrap(make(Skips, layers), MICROBATCHES, schedule=name)
    steps = []
    for _ in range(2):
        calls.clear()
        wrapped.run_train(x=rows(2 * MICROBATCHES))
        steps.append(list(calls))
    return [compiled, steps]


def _edges(name: str) -> frozenset[tuple[int, int]]:
    """The first two stages of ``Skips`` send to all later ones."""
    stages = RANKS * FAMILIES[name].default_chunks
    return frozenset(
        (source, destination)
        for source in range(stages)
        for destination in range(source + 1, stages)
        if destination == source + 1 or source < 2
    )


def _expected(calls: RankCalls, edges: frozenset[tuple[int, int]]) -> Iterator[Noted]:
    for call in calls:
        if call.kind in (CallKind.POST, CallKind.SEND):
            yield call.kind.name, call.transfers[0]
        elif call.boundary is not None and not call.boundary[2] and call.boundary[:2] in edges:
            yield call.kind.name, call.boundary[:2]
        elif call.kind is CallKind.COMPUTE and call.action.kind is not ActionKind.WEIGHT_GRADIENT:
            yield call.kind.name, call.action.microbatch


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        pytest.param("1f1b", GLOO, marks=pytest.mark.cpu_only("a device has no calls of gloo"), id="gloo"),
        pytest.param("zb-v", NCCL, id="nccl"),
    ],
)
def test_the_model_makes_the_calls_of_the_engine(name: str, rules: TransportRules) -> None:
    edges = _edges(name)
    model = programs(FAMILIES[name].build(RANKS, MICROBATCHES), edges, rules)

    for rank, (compiled, steps) in enumerate(run_ranks(RANKS, _train, name, rules)):
        actions = model.ranks[rank]
        assert compiled == [actions], "the very list of the engine"
        for step, calls in enumerate(steps):
            expected = RankCalls(actions, model.exchanges, rules.posted_ahead is None, step == 0, None)
            assert calls == list(_expected(expected, edges))
