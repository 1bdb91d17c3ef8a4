"""From compute actions to the full list: the sends and receives follow from who needs whose values.

A receive is posted ``posted_ahead`` compute actions before the one that needs it, so that a transfer runs while
its receiver still computes; a send follows at once after the compute action that makes the value. Rank 1 of 3,
one ahead::

    compute   1F0                     1F1                      1B0 ...
    lowered   RECV 1F0, RECV 1F1, 1F0, SEND 1F0, RECV 1B0, 1F1, SEND 1F1, RECV 1F2, 1B0, SEND 1B0 ...

The gradient of what a stage received leaves after its full backward, or after its input-gradient where that is
apart. Between stages on one rank nothing is sent.

Two ranks exchange activations one way and gradients one way, each in one stream without tags, so a rank posts the
receives from another in the order in which that one sends, even if it then posts one of them earlier than
``posted_ahead`` asks for. What deadlock takes is then a circle in the compute actions themselves (``check``), or a
rank that may have too few sends in flight (``rendezvous``).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from nxdpp.schedules.actions import Action, ActionKind, Schedule

# (maker, user): a value that stage ``maker`` makes is an input of stage ``user``.
StagePair = tuple[int, int]

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
_RECEIVED_AS = {
    ActionKind.SEND_ACTIVATION: ActionKind.RECEIVE_ACTIVATION,
    ActionKind.SEND_GRADIENT: ActionKind.RECEIVE_GRADIENT,
}


def lower(schedule: Schedule, edges: Collection[StagePair], posted_ahead: int = 2) -> Schedule:
    """Add the sends and receives to each rank's compute actions.

    Sends and receives name their peer: they move what one pair of stages exchanges. Where a rank has one stage,
    those of one moment are one action without a peer, for all that the stage exchanges.

    Args:
        schedule: compute actions of each rank, a schedule that ``check`` accepts.
        edges: which stage's values are inputs of which; gradients go the other way.
        posted_ahead: how many compute actions before its use a receive is posted; bounds the buffers held.
    """
    lowering = _Lowering(schedule, edges, posted_ahead)
    return [lowering.rank(rank) for rank in range(len(schedule))]


def lower_rank(schedule: Schedule, rank: int, edges: Collection[StagePair], posted_ahead: int = 2) -> list[Action]:
    """The list of ``rank`` that ``lower`` makes; of ``edges``, those of its own stages are enough."""
    return _Lowering(schedule, edges, posted_ahead).rank(rank)


def matching_receive(send: Action) -> Action:
    """The receive, on another rank, of a send that names its peer."""
    assert send.peer is not None, "a send to every user has several receives"
    return Action(send.peer, _RECEIVED_AS[send.kind], send.microbatch, send.stage)


class Exchanges:
    """Which sends and receives a compute action entails; nothing where both stages are on one rank."""

    def __init__(self, schedule: Schedule, edges: Collection[StagePair]) -> None:
        self.rank_of = {stage: rank for rank, actions in enumerate(schedule) for stage in {a.stage for a in actions}}
        assert all(stage in self.rank_of for edge in edges for stage in edge), "edges join stages of the schedule"
        remote = [edge for edge in sorted(edges) if self.rank_of[edge[0]] != self.rank_of[edge[1]]]
        self.users: defaultdict[int, list[int]] = defaultdict(list)
        self.makers: defaultdict[int, list[int]] = defaultdict(list)
        for maker, user in remote:
            self.users[maker].append(user)
            self.makers[user].append(maker)

    def sends(self, action: Action) -> list[Action]:
        """What leaves after ``action``, one send for each stage that it goes to."""
        stage, kind, microbatch, _ = action
        if kind is ActionKind.FORWARD:
            return [Action(stage, ActionKind.SEND_ACTIVATION, microbatch, user) for user in self.users[stage]]
        if kind in _BACKWARDS:
            return [Action(stage, ActionKind.SEND_GRADIENT, microbatch, maker) for maker in self.makers[stage]]
        return []

    def receives(self, action: Action) -> list[Action]:
        """What ``action`` waits for, one receive for each stage that it comes from."""
        stage, kind, microbatch, _ = action
        if kind is ActionKind.FORWARD:
            return [Action(stage, ActionKind.RECEIVE_ACTIVATION, microbatch, maker) for maker in self.makers[stage]]
        if kind in _BACKWARDS:
            return [Action(stage, ActionKind.RECEIVE_GRADIENT, microbatch, user) for user in self.users[stage]]
        return []

    def peers(self, action: Action) -> list[int]:
        """The stages that a send or receive of a stage can have as its peer."""
        to_users = action.kind in (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
        return (self.users if to_users else self.makers)[action.stage]


class _Lowering:
    def __init__(self, schedule: Schedule, edges: Collection[StagePair], posted_ahead: int) -> None:
        self._schedule = schedule
        self._exchanges = Exchanges(schedule, edges)
        self._posted_ahead = posted_ahead

    def rank(self, rank: int) -> list[Action]:
        actions = self._schedule[rank]
        posts = self._posts(rank)
        merged = len({action.stage for action in actions}) == 1
        lowered: list[Action] = []
        for position, action in enumerate(actions):
            posted, sent = posts[position], self._exchanges.sends(action)
            lowered += self._merge(posted) if merged else posted
            lowered.append(action)
            lowered += self._merge(sent) if merged else sent
        return lowered

    def _posts(self, rank: int) -> list[list[Action]]:
        """The receives to post before each compute action of ``rank``."""
        uses = {
            receive: position
            for position, action in enumerate(self._schedule[rank])
            for receive in self._exchanges.receives(action)
        }
        posts: list[list[Action]] = [[] for _ in self._schedule[rank]]
        for stream in self._streams_to(rank, uses):
            latest = len(posts)
            positions = []
            for receive in reversed(stream):
                latest = min(latest, max(0, uses[receive] - self._posted_ahead))
                positions.append(latest)
            for receive, position in zip(stream, reversed(positions), strict=True):
                posts[position].append(receive)
        return posts

    def _streams_to(self, rank: int, uses: Iterable[Action]) -> list[list[Action]]:
        """For each rank that sends to ``rank``, and each direction, the receives in the order of its sends."""
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
        """One action without a peer for those that differ in the peer alone, where no stream changes its order."""
        by_peer: defaultdict[tuple[ActionKind, int | None], list[int]] = defaultdict(list)
        for action in actions:
            by_peer[action.kind, action.peer].append(action.microbatch)
        merged = list(dict.fromkeys(action._replace(peer=None) for action in actions))
        for action in merged:
            in_order = [each.microbatch for each in merged if each.kind is action.kind]
            if any(by_peer[action.kind, peer] != in_order for peer in self._exchanges.peers(action)):
                return actions
        return merged
