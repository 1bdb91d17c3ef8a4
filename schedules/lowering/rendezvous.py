"""Whether a lowered schedule comes to its end where a send is over only when its receive has been posted.

What a rank does at an action: it posts a receive and goes on; it waits for all that a compute action needs; it starts
a send and goes on, unless more than a given number of sends are then in flight from one stage to another, in which
case it waits for the oldest of those. At its end it waits for all its sends.

Whether all ranks come to their end does not depend on how fast each of them is: what a rank waits for, once it is
over, stays so. One run tells.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.lowering.lowering import Exchanges, StagePair, matching_receive

_RECEIVES = (ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
_SENDS = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)


def check_lowered(lowered: Schedule, edges: Collection[StagePair], in_flight: int | None = None) -> None:
    """Check the sends and receives of all ranks.

    The rules: each send has its receive and each receive its send; two ranks send and receive in the same order, for
    each direction; a receive is posted before the action that needs it; no rank waits for ever.

    Args:
        lowered: the actions of each rank, of a schedule that ``check`` accepts.
        edges: which stage's values are inputs of which.
        in_flight: how many sends from one stage to another may be in flight; ``None`` for any number, 0 for a rank
            that waits for each send.

    Raises:
        ScheduleError: where a rule is broken; names the rank, the action and the rule.
    """
    exchanges = Exchanges(lowered, edges)
    _check_streams(lowered, exchanges)
    _check_posted(lowered, exchanges)
    _check_waits(lowered, exchanges, in_flight)


def sends_in_flight(lowered: Schedule, edges: Collection[StagePair]) -> int:
    """The fewest sends from one stage to another that must be allowed in flight for ``lowered`` to end.

    Raises ``ScheduleError`` where no number is enough.
    """
    check_lowered(lowered, edges)
    exchanges = Exchanges(lowered, edges)
    enough = 0
    while not _ends(lowered, exchanges, enough):
        enough = 2 * enough or 1
    # More than half of it is needed: less was tried.
    return bisect_left(range(enough), True, lo=enough // 2, key=lambda limit: _ends(lowered, exchanges, limit))


def _ends(lowered: Schedule, exchanges: Exchanges, in_flight: int) -> bool:
    try:
        _check_waits(lowered, exchanges, in_flight)
    except ScheduleError:
        return False
    return True


def _check_waits(lowered: Schedule, exchanges: Exchanges, in_flight: int | None) -> None:
    network = _Network(exchanges)
    limit = sum(map(len, lowered)) if in_flight is None else in_flight
    ranks = [_run_rank(actions, network, limit) for actions in lowered]
    waits = [next(rank, None) for rank in ranks]
    progress = True
    while progress:
        progress = False
        for rank, running in enumerate(ranks):
            while (wait := waits[rank]) is not None and network.is_over(wait[1]):
                waits[rank] = next(running, None)
                progress = True
    if stuck := [(rank, *wait) for rank, wait in enumerate(waits) if wait is not None]:
        raise ScheduleError(
            "the ranks wait for each other for ever: "
            + ", ".join(_waiting(rank, at, lowered[rank], send, exchanges) for rank, at, send in stuck)
            + ("." if in_flight is None else f", with {in_flight} sends in flight from a stage to another.")
        )


def _each(action: Action, exchanges: Exchanges) -> list[Action]:
    """A send or receive for every stage it has to do with."""
    if action.peer is not None:
        return [action]
    return [action._replace(peer=peer) for peer in exchanges.peers(action)]


def _check_streams(lowered: Schedule, exchanges: Exchanges) -> None:
    sent: defaultdict[tuple[int, int, ActionKind], list[tuple[int, Action]]] = defaultdict(list)
    received: defaultdict[tuple[int, int, ActionKind], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(lowered):
        for at, action in enumerate(actions):
            for each in _each(action, exchanges) if action.kind in _SENDS + _RECEIVES else ():
                assert each.peer is not None, "each names its peer"
                other = exchanges.rank_of[each.peer]
                if each.kind in _SENDS:
                    sent[rank, other, matching_receive(each).kind].append((at, each))
                else:
                    received[other, rank, each.kind].append((at, each))
    for stream in sorted(sent.keys() | received.keys(), key=lambda stream: (*stream[:2], stream[2].value)):
        _check_stream(stream[0], stream[1], sent[stream], received[stream])


def _check_stream(
    source: int, destination: int, sent: list[tuple[int, Action]], received: list[tuple[int, Action]]
) -> None:
    expected = {matching_receive(send) for _, send in sent}
    posted = {receive for _, receive in received}
    for at, send in sent:
        if matching_receive(send) not in posted:
            raise ScheduleError(
                f"rank {source}, action {at} ({send}): rank {destination} posts no receive for it; every send has one."
            )
    for at, receive in received:
        if receive not in expected:
            raise ScheduleError(
                f"rank {destination}, action {at} ({receive}): rank {source} sends nothing for it; every receive has "
                f"its send."
            )
    for (_, send), (at, receive) in zip(sent, received, strict=False):
        if matching_receive(send) != receive:
            raise ScheduleError(
                f"rank {destination}, action {at} ({receive}): rank {source} sends {send} first; receives are posted "
                f"in the order of the sends."
            )
    if len(sent) != len(received):
        raise ScheduleError(f"rank {source} sends rank {destination} {len(sent)} times, {len(received)} are received.")


def _check_posted(lowered: Schedule, exchanges: Exchanges) -> None:
    for rank, actions in enumerate(lowered):
        posted: set[Action] = set()
        for at, action in enumerate(actions):
            if action.kind in _RECEIVES:
                posted.update(_each(action, exchanges))
            for receive in exchanges.receives(action):
                if receive not in posted:
                    raise ScheduleError(
                        f"rank {rank}, action {at} ({action}): {receive} is not posted before it; an action needs "
                        f"all that it receives."
                    )


class _Network:
    """Which receives are posted and which sends are started, all by their receive; one is over when it is both."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.posted: set[Action] = set()
        self.started: set[Action] = set()

    def is_over(self, receive: Action) -> bool:
        return receive in self.posted and receive in self.started


def _run_rank(actions: Iterable[Action], network: _Network, in_flight: int) -> Iterator[tuple[int, Action]]:
    """Do the actions; what comes out is where the rank is and the receive that must be over before it goes on."""
    sends: defaultdict[tuple[int, int | None, ActionKind], deque[Action]] = defaultdict(deque)
    at = 0
    for at, action in enumerate(actions):
        if action.kind in _RECEIVES:
            network.posted.update(_each(action, network.exchanges))
        elif action.kind in _SENDS:
            for send in _each(action, network.exchanges):
                receive = matching_receive(send)
                network.started.add(receive)
                queue = sends[send.stage, send.peer, send.kind]
                queue.append(receive)
                if len(queue) > in_flight:
                    yield at, queue.popleft()
        else:
            for receive in network.exchanges.receives(action):
                yield at, receive
    for queue in sends.values():
        for receive in queue:
            yield at, receive


def _waiting(rank: int, at: int, actions: list[Action], receive: Action, exchanges: Exchanges) -> str:
    what = f"rank {rank}, action {at} ({actions[at]}) waits "
    assert receive.peer is not None, "each names its peer"
    if exchanges.rank_of[receive.stage] == rank:
        return what + f"for what stage {receive.peer} sends rank {rank} ({receive})"
    return what + f"for rank {exchanges.rank_of[receive.stage]} to post {receive}"
