"""Deadlock check under rendezvous semantics: a send completes only after its receive is posted.

A rank posts a receive and continues. It waits for the inputs of a compute action. It starts a send. If more sends
than a given number are then in flight from one stage to another, it waits for the oldest. At the end it waits for all
its sends.

A sum of tied weights needs all ranks of the pipeline that have one. The other actions of participants wait for
replicas or tensor ranks, which run the same actions in the same order: there a rank waits for no rank of its pipeline.

The result does not depend on the speed of the ranks, since a finished transfer stays finished. One run is enough.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence

from nxdpp.schedules.actions import COMPUTE, Action, ActionKind, Schedule
from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.lowering.lowering import Exchanges, StagePair, matching_receive

_RECEIVES = (ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
_SENDS = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)


def sends_in_flight(lowered: Schedule, edges: Collection[StagePair]) -> int:
    """Return the fewest sends in flight from stage to stage with which ``lowered`` ends, or raise ``ScheduleError``."""

    def ends(in_flight: int) -> bool:
        try:
            check_lowered(lowered, edges, in_flight)
        except ScheduleError:
            return False
        return True

    check_lowered(lowered, edges)
    enough = 0
    while not ends(enough):
        enough = 2 * enough or 1
    # Half of it was not enough.
    return bisect_left(range(enough), True, lo=enough // 2, key=ends)


def check_lowered(lowered: Schedule, edges: Collection[StagePair], in_flight: int | None = None) -> None:
    """Check that all ranks come to the end of the actions that ``lower`` makes of a schedule that ``check`` accepts.

    ``in_flight`` is the most sends in flight from one stage to another; ``None`` for any number, 0 to wait for each
    send. Raises ``ScheduleError`` for a deadlock, with the ranks and actions.
    """
    sums = {action for actions in lowered for action in actions if action.kind is ActionKind.SUM_TIES}
    network = _Network(Exchanges(lowered, edges), sums)
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
            "deadlock: "
            + "; ".join(_waiting(rank, at, lowered[rank], wait, network) for rank, at, wait in stuck)
            + ("." if in_flight is None else f", with {in_flight} sends in flight from a stage to another.")
        )


class _Network:
    """Posted receives and started sends, both as receives; a transfer that is in both sets is over."""

    def __init__(self, exchanges: Exchanges, sums: set[Action]) -> None:
        self.exchanges = exchanges
        self.posted: set[Action] = set()
        self.started: set[Action] = set()
        # The sum of tied weights on each of its ranks; it is posted where a rank has come to it.
        self.sums = sums

    def is_over(self, wait: Action) -> bool:
        return self.sums <= self.posted if wait in self.sums else wait in self.posted and wait in self.started


def _run_rank(actions: Sequence[Action], network: _Network, in_flight: int) -> Iterator[tuple[int, Action]]:
    """Run the actions; yields the place of the rank and the transfer or sum that must be over before it continues."""
    sends: defaultdict[tuple[int, int | None, ActionKind], deque[Action]] = defaultdict(deque)
    at = 0
    for at, action in enumerate(actions):
        if action.kind in _RECEIVES:
            network.posted.update(network.exchanges.each(action))
        elif action.kind in _SENDS:
            for send in network.exchanges.each(action):
                receive = matching_receive(send)
                network.started.add(receive)
                queue = sends[send.stage, send.peer, send.kind]
                queue.append(receive)
                if len(queue) > in_flight:
                    yield at, queue.popleft()
        elif action.kind in COMPUTE:
            for receive in network.exchanges.receives(action):
                yield at, receive
        elif action.kind is ActionKind.DISPATCH:
            # The forward of the pair goes on when its backward does.
            second = next(each for each in actions[at:] if each.kind is ActionKind.BACKWARD)
            for receive in network.exchanges.receives(second):
                yield at, receive
        elif action in network.sums:
            network.posted.add(action)
            yield at, action
    for queue in sends.values():
        for receive in queue:
            yield at, receive


def _waiting(rank: int, at: int, actions: list[Action], wait: Action, network: _Network) -> str:
    what, rank_of = f"rank {rank}, action {at} ({actions[at]}) waits ", network.exchanges.rank_of
    if wait in network.sums:
        missing = min(network.sums - network.posted, key=str)
        return what + f"for rank {rank_of[missing.stage]} to come to {missing}"
    assert wait.peer is not None, "each has a peer"
    if rank_of[wait.stage] == rank:
        return what + f"for stage {wait.peer} to send to rank {rank} ({wait})"
    return what + f"for rank {rank_of[wait.stage]} to post {wait}"
