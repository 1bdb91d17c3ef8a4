"""Lowering: add sends and receives to the compute actions of each rank.

A receive is posted ``posted_ahead`` compute actions before its use, so that the transfer overlaps with computation. A
send follows its compute action at once. Rank 1 of 3, one ahead::

    compute   1F0                     1F1                      1B0 ...
    lowered   RECV 1F0, RECV 1F1, 1F0, SEND 1F0, RECV 1B0, 1F1, SEND 1F1, RECV 1F2, 1B0, SEND 1B0 ...

A stage sends the gradients of its inputs after its full backward or input-gradient. Stages on one rank send nothing.

The transfers between two ranks have one stream without tags for each direction. A rank therefore posts the receives
from another in the order of its sends, some earlier than ``posted_ahead``. A deadlock then needs a circle of compute
actions (``check``), or too few sends in flight (``rendezvous``).

With ``posted_ahead=None`` receives are posted in the global order (``global_order``), as NCCL needs it.

The two actions of a pair (``TOKENS``) run at once: the receives of the second one are posted before the first.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from nxdpp.schedules.actions import Action, ActionKind, Schedule, pairs
from nxdpp.schedules.lowering.additions import TOKENS, add
from nxdpp.schedules.lowering.global_order import GlobalOrder

# (source, destination): an output of stage ``source`` is an input of stage ``destination``.
StagePair = tuple[int, int]

_WITH_DESTINATIONS = (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
_RECEIVED_AS = {
    ActionKind.SEND_ACTIVATION: ActionKind.RECEIVE_ACTIVATION,
    ActionKind.SEND_GRADIENT: ActionKind.RECEIVE_GRADIENT,
}


def lower(
    schedule: Schedule, edges: Collection[StagePair], posted_ahead: int | None = 2, paired: bool = False
) -> Schedule:
    """Add the sends and receives to each rank's compute actions, a schedule that ``check`` accepts.

    Sends and receives name their peer. On a rank with one stage, all at one place become one action without a peer.
    ``edges`` are pairs of stages that exchange activations; gradients go in the other direction. ``posted_ahead`` is
    the number of compute actions between a receive and its use; it bounds the buffers held. ``None`` posts receives in
    the global order. All sends and receives then name their peer. ``paired`` is for a schedule whose ``pairs`` run at
    once.
    """
    lowering = _Lowering(schedule, edges, posted_ahead, paired)
    return [lowering.rank(rank) for rank in range(len(schedule))]


def lower_rank(
    schedule: Schedule, rank: int, edges: Collection[StagePair], posted_ahead: int | None = 2, paired: bool = False
) -> list[Action]:
    """Return the list of ``rank`` in ``lower``; ``edges`` needs only the edges of its own stages."""
    return _Lowering(schedule, edges, posted_ahead, paired).rank(rank)


def matching_receive(send: Action) -> Action:
    """Return the receive of a send that names its peer."""
    assert send.peer is not None, "a send without a peer has several receives"
    return Action(send.peer, _RECEIVED_AS[send.kind], send.microbatch, send.stage)


class Exchanges:
    """Sends and receives of each compute action; stages on one rank exchange nothing."""

    def __init__(self, schedule: Schedule, edges: Collection[StagePair]) -> None:
        self.rank_of = {stage: rank for rank, actions in enumerate(schedule) for stage in {a.stage for a in actions}}
        assert all(stage in self.rank_of for edge in edges for stage in edge), "edges join stages of the schedule"
        remote = [edge for edge in sorted(edges) if self.rank_of[edge[0]] != self.rank_of[edge[1]]]
        self._destinations: defaultdict[int, list[int]] = defaultdict(list)
        self._sources: defaultdict[int, list[int]] = defaultdict(list)
        for source, destination in remote:
            self._destinations[source].append(destination)
            self._sources[destination].append(source)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    def each(self, action: Action) -> list[Action]:
        """Return one send or receive for each peer of a lowered action."""
        if action.peer is not None:
            return [action]
        return [action._replace(peer=peer) for peer in self.peers(action)]

    def sends(self, action: Action) -> list[Action]:
        """Return the sends after ``action``, one for each destination stage."""
        return self._exchanged(action, ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)

    def receives(self, action: Action) -> list[Action]:
        """Return the receives that ``action`` waits for, one for each source stage."""
        return self._exchanged(action, ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)

    def _exchanged(self, action: Action, of_forward: ActionKind, of_backward: ActionKind) -> list[Action]:
        stage, kind, microbatch, _ = action
        if kind is ActionKind.WEIGHT_GRADIENT:
            return []
        exchanged = of_forward if kind is ActionKind.FORWARD else of_backward
        to_destinations = exchanged in _WITH_DESTINATIONS
        peers = (self._destinations if to_destinations else self._sources)[stage]
        return [Action(stage, exchanged, microbatch, peer) for peer in peers]

    def sources(self, stage: int) -> list[int]:
        """Return the stages of other ranks whose activations ``stage`` receives."""
        return self._sources[stage]

    def destinations(self, stage: int) -> list[int]:
        """Return the stages of other ranks that receive activations of ``stage``."""
        return self._destinations[stage]

    def peers(self, action: Action) -> list[int]:
        """Return the possible peers of a send or receive."""
        return (self._destinations if action.kind in _WITH_DESTINATIONS else self._sources)[action.stage]


class _Lowering:
    def __init__(
        self, schedule: Schedule, edges: Collection[StagePair], posted_ahead: int | None, paired: bool
    ) -> None:
        self._schedule = schedule
        self._paired = paired
        self._exchanges = Exchanges(schedule, edges)
        self._posted_ahead = posted_ahead
        self._order: GlobalOrder | None = None
        if posted_ahead is None:
            self._order = GlobalOrder([add(actions, TOKENS) for actions in schedule] if paired else schedule)

    def rank(self, rank: int) -> list[Action]:
        actions = self._schedule[rank]
        if self._order is None:
            posts = self._posts(rank, self._posted_ahead or 0)
        else:
            posts = self._posts_in_order(rank, self._order)
        # One action for several peers has no place in the global order.
        merged = self._order is None and len({action.stage for action in actions}) == 1
        lowered: list[Action] = []
        for position, action in enumerate(actions):
            posted, sent = posts[position], self._exchanges.sends(action)
            lowered += self._merge(posted) if merged else posted
            lowered.append(action)
            lowered += self._merge(sent) if merged else sent
        return lowered

    def _posts_in_order(self, rank: int, order: GlobalOrder) -> list[list[Action]]:
        """Return the receives to post before each compute action of ``rank``, in the global order."""
        posts: list[list[Action]] = [[] for _ in self._schedule[rank]]
        receives = [receive for action in self._schedule[rank] for receive in self._exchanges.receives(action)]
        for receive in sorted(receives, key=order.key):
            posts[order.position(rank, receive)].append(receive)
        return posts

    def _posts(self, rank: int, posted_ahead: int) -> list[list[Action]]:
        """Return the receives to post before each compute action of ``rank``, ``posted_ahead`` before their use."""
        firsts = {second: first for first, second in pairs(self._schedule[rank]).items()} if self._paired else {}
        uses = {
            receive: firsts.get(position, position)
            for position, action in enumerate(self._schedule[rank])
            for receive in self._exchanges.receives(action)
        }
        posts: list[list[Action]] = [[] for _ in self._schedule[rank]]
        for stream in self._streams_to(rank, uses):
            latest = len(posts)
            positions = []
            for receive in reversed(stream):
                latest = min(latest, max(0, uses[receive] - posted_ahead))
                positions.append(latest)
            for receive, position in zip(stream, reversed(positions), strict=True):
                posts[position].append(receive)
        return posts

    def _streams_to(self, rank: int, uses: Iterable[Action]) -> list[list[Action]]:
        """Return the receives of ``rank`` for each other rank and direction, in the order of its sends."""
        rank_of = self._exchanges.rank_of
        streams: dict[tuple[int, ActionKind], list[Action]] = {
            (source, kind): []
            for source in sorted({rank_of[use.peer] for use in uses if use.peer is not None})
            for kind in _RECEIVED_AS
        }
        for source in sorted({source for source, _ in streams}):
            for action in self._schedule[source]:
                for send in self._exchanges.sends(action):
                    assert send.peer is not None, "exchanges name their peers"
                    if rank_of[send.peer] == rank:
                        streams[source, send.kind].append(matching_receive(send))
        return list(streams.values())

    def _merge(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Merge actions that differ only in the peer, unless that changes the order of a stream."""
        by_peer: defaultdict[tuple[ActionKind, int | None], list[int]] = defaultdict(list)
        for action in actions:
            by_peer[action.kind, action.peer].append(action.microbatch)
        merged = list(dict.fromkeys(action._replace(peer=None) for action in actions))
        for action in merged:
            in_order = [each.microbatch for each in merged if each.kind is action.kind]
            if any(by_peer[action.kind, peer] != in_order for peer in self._exchanges.peers(action)):
                return actions
        return merged
