"""Sends and receives: each has its partner, comes in time, and nobody waits for ever."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.forward_only import forward_only
from nxdpp.schedules.lowering import StageEdge, lower
from nxdpp.schedules.one_forward_one_backward import one_forward_one_backward

COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD)
NEEDED_BY = {ActionKind.RECEIVE_ACTIVATION: ActionKind.FORWARD, ActionKind.RECEIVE_GRADIENT: ActionKind.BACKWARD}
MADE_BY = {ActionKind.SEND_ACTIVATION: ActionKind.FORWARD, ActionKind.SEND_GRADIENT: ActionKind.BACKWARD}

AHEAD = st.integers(0, 4)
schedules = st.sampled_from([one_forward_one_backward, forward_only])


@st.composite
def pipelines(draw: st.DrawFn, ahead: st.SearchStrategy[int] = AHEAD) -> tuple[int, int, frozenset[StageEdge], int]:
    """Stages, microbatches, edges (any, among them chains with skips) and how early receives are posted."""
    stages = draw(st.integers(1, 8))
    possible = [(maker, user) for maker in range(stages) for user in range(maker + 1, stages)]
    chain = {(stage, stage + 1) for stage in range(stages - 1)}
    some = draw(st.sets(st.sampled_from(possible))) if possible else set()
    edges = some if draw(st.booleans()) else some | chain
    return stages, draw(st.integers(1, 16)), frozenset(edges), draw(ahead)


class Message(NamedTuple):
    """What one stage sends another of a microbatch."""

    sender: int
    receiver: int
    kind: ActionKind
    microbatch: int


class Network:
    """Which receives are posted and which sends are started; under rendezvous, neither is over without the other."""

    def __init__(self, edges: Collection[StageEdge]) -> None:
        self.edges = edges
        self.posted: set[Message] = set()
        self.started: set[Message] = set()

    def is_over(self, message: Message) -> bool:
        return message in self.posted and message in self.started

    def messages(self, action: Action) -> list[Message]:
        """What a send or receive moves, and what a compute action needs."""
        stage, kind, microbatch = action
        if kind in (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_GRADIENT):
            pairs = [(stage, user) for maker, user in self.edges if maker == stage]
        else:
            pairs = [(maker, stage) for maker, user in self.edges if user == stage]
        if kind in (ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT):
            return [Message(user, maker, ActionKind.SEND_GRADIENT, microbatch) for maker, user in pairs]
        return [Message(maker, user, ActionKind.SEND_ACTIVATION, microbatch) for maker, user in pairs]


def run_rank(actions: list[Action], network: Network, in_flight: Callable[[int], int]) -> Iterator[Message]:
    """Do the actions; each message that comes out is one that the rank waits for before it goes on.

    ``in_flight`` says for a distance between stages how many sends can be under way.
    """
    sends: dict[tuple[int, ActionKind], deque[Message]] = defaultdict(deque)
    receives = {use: receive for receive, use in NEEDED_BY.items()}
    for action in actions:
        if action.kind in NEEDED_BY:
            network.posted.update(network.messages(action))
        elif action.kind in COMPUTE:
            yield from network.messages(action._replace(kind=receives[action.kind]))
        else:
            for message in network.messages(action):
                network.started.add(message)
                queue = sends[message.receiver, message.kind]
                queue.append(message)
                if len(queue) > in_flight(abs(message.receiver - message.sender)):
                    yield queue.popleft()
    for queue in sends.values():
        yield from queue


def simulate(schedule: Schedule, edges: Collection[StageEdge], in_flight: Callable[[int], int]) -> None:
    """Run all ranks under rendezvous; fail where none can go on."""
    network = Network(edges)
    ranks = [run_rank(actions, network, in_flight) for actions in schedule]
    waits = [next(rank, None) for rank in ranks]
    while waiting := {rank: message for rank, message in enumerate(waits) if message is not None}:
        free = [rank for rank, message in waiting.items() if network.is_over(message)]
        assert free, f"deadlock; the ranks wait for {waiting}"
        for rank in free:
            waits[rank] = next(ranks[rank], None)


def as_in_the_transport(distance: int) -> int:
    return max(2, distance)


@given(pipelines(), schedules)
def test_compute_actions_stay_as_they_are(
    pipeline: tuple[int, int, frozenset[StageEdge], int], make: Callable[[int, int], Schedule]
) -> None:
    stages, microbatches, edges, ahead = pipeline
    schedule = make(stages, microbatches)

    lowered = lower(schedule, edges, ahead)

    assert [[action for action in actions if action.kind in COMPUTE] for actions in lowered] == schedule


@given(pipelines(), schedules)
def test_sends_and_receives_are_just_those_of_the_edges(
    pipeline: tuple[int, int, frozenset[StageEdge], int], make: Callable[[int, int], Schedule]
) -> None:
    stages, microbatches, edges, ahead = pipeline
    makers = {maker for maker, _ in edges}
    users = {user for _, user in edges}
    expected = Counter(
        Action(stage, kind, microbatch)
        for microbatch in range(microbatches)
        for group, kind, trains in (
            (makers, ActionKind.SEND_ACTIVATION, False),
            (users, ActionKind.RECEIVE_ACTIVATION, False),
            (users, ActionKind.SEND_GRADIENT, True),
            (makers, ActionKind.RECEIVE_GRADIENT, True),
        )
        for stage in group
        if make is one_forward_one_backward or not trains
    )

    lowered = lower(make(stages, microbatches), edges, ahead)

    assert Counter(action for actions in lowered for action in actions if action.kind not in COMPUTE) == expected


@given(pipelines(), schedules)
def test_a_receive_is_posted_in_time_and_at_most_so_many_actions_early(
    pipeline: tuple[int, int, frozenset[StageEdge], int], make: Callable[[int, int], Schedule]
) -> None:
    stages, microbatches, edges, ahead = pipeline

    for actions in lower(make(stages, microbatches), edges, ahead):
        for position, action in enumerate(actions):
            if action.kind not in NEEDED_BY:
                continue
            use = actions.index(action._replace(kind=NEEDED_BY[action.kind]))
            between = [a for a in actions[position:use] if a.kind in COMPUTE]
            assert position < use
            assert len(between) <= ahead


@given(pipelines(), schedules)
def test_a_send_follows_at_once_after_what_makes_its_value(
    pipeline: tuple[int, int, frozenset[StageEdge], int], make: Callable[[int, int], Schedule]
) -> None:
    stages, microbatches, edges, ahead = pipeline

    for actions in lower(make(stages, microbatches), edges, ahead):
        for before, action in zip([None, *actions], actions, strict=False):
            if action.kind in MADE_BY:
                assert before == action._replace(kind=MADE_BY[action.kind])


@pytest.mark.parametrize("under_way", [0, 2])
@given(stages=st.integers(1, 8), microbatches=st.integers(1, 16), make=schedules)
@settings(max_examples=60)
def test_no_deadlock_under_rendezvous_in_a_chain(
    stages: int, microbatches: int, make: Callable[[int, int], Schedule], under_way: int
) -> None:
    edges = {(stage, stage + 1) for stage in range(stages - 1)}

    simulate(lower(make(stages, microbatches), edges), edges, lambda _: under_way)


@given(pipelines(ahead=st.just(2)), schedules)
@settings(max_examples=100)
def test_no_deadlock_with_connections_that_skip_stages(
    pipeline: tuple[int, int, frozenset[StageEdge], int], make: Callable[[int, int], Schedule]
) -> None:
    stages, microbatches, edges, ahead = pipeline

    simulate(lower(make(stages, microbatches), edges, ahead), sorted(edges), as_in_the_transport)


def test_no_deadlock_where_a_value_skips_six_stages() -> None:
    """Two sends under way would not do: the last stage posts its receives later than the first one sends."""
    edges = [*((stage, stage + 1) for stage in range(7)), (0, 7)]
    schedule = lower(one_forward_one_backward(8, 9), edges)

    simulate(schedule, edges, as_in_the_transport)
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(schedule, edges, lambda _: 2)


def test_the_simulator_finds_a_deadlock() -> None:
    edges = {(0, 1)}
    schedule = lower(forward_only(2, 2), edges)
    schedule[1] = [action for action in schedule[1] if action.kind is not ActionKind.RECEIVE_ACTIVATION]

    with pytest.raises(AssertionError, match="deadlock; the ranks wait for"):
        simulate(schedule, edges, as_in_the_transport)


def test_the_example_in_the_module() -> None:
    edges = {(0, 1), (1, 2)}

    actions = lower(one_forward_one_backward(3, 4), edges, posted_ahead=1)[1]

    assert list(map(str, actions[:10])) == [
        "1RECV_F0",
        "1RECV_F1",
        "1F0",
        "1SEND_F0",
        "1RECV_B0",
        "1F1",
        "1SEND_F1",
        "1RECV_F2",
        "1B0",
        "1SEND_B0",
    ]


def test_stages_without_edges_send_nothing() -> None:
    assert lower(one_forward_one_backward(2, 2), ()) == one_forward_one_backward(2, 2)
