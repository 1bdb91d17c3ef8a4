"""Calls of a rank: its actions, as the engine and the channels carry them out.

A first step has more calls than a later one: the stages exchange metadata. With receives posted ahead, those without a
layout are posted late (``ReceiveQueue`` of ``pipeline/p2p/channel.py``). In the global order the rank waits for the
layout at the place of the receive.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from nxdpp.schedules.actions import ADDED, Action, ActionKind
from nxdpp.schedules.lowering.lowering import Exchanges, matching_receive
from nxdpp.schedules.lowering.releases import RELEASE_OF

_RECEIVES = (ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
_SENDS = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)
_SEND_OF = {release: send for send, release in RELEASE_OF.items()}


class CallKind(Enum):
    """Kind of a call.

    Attributes:
        POST: start a receive.
        COMPUTE: run a compute action after the arrival of the receives that it waits for.
        SEND: start a send.
        WAIT_SENT: make later computations wait for the end of a send.
        SEND_METADATA: send layouts to a stage; does not wait.
        WAIT_METADATA: wait for layouts of a stage.
        COLLECTIVE: take part in an exchange of a participant.
    """

    POST = auto()
    COMPUTE = auto()
    SEND = auto()
    WAIT_SENT = auto()
    SEND_METADATA = auto()
    WAIT_METADATA = auto()
    COLLECTIVE = auto()


class Call(NamedTuple):
    """A call of ``action``.

    ``transfers`` are those that it starts or waits for, as receives. ``boundary`` is that of the metadata: the source
    stage, the destination stage, and whether the metadata is that of gradients.
    """

    kind: CallKind
    action: Action
    transfers: Sequence[Action] = ()
    boundary: tuple[int, int, bool] | None = None


class RankCalls:
    """The calls of one rank in one step.

    Args:
        actions: the actions of the rank, as the engine compiles them.
        exchanges: of the whole schedule.
        in_order: ``True`` if receives are posted in the global order.
        first_step: ``True`` for a step with metadata exchange.
        in_flight: limit of sends in flight, in a first step in the global order alone; ``None`` for none.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        exchanges: Exchanges,
        in_order: bool,
        first_step: bool,
        in_flight: int | None,
    ) -> None:
        self._actions = actions
        self._exchanges = exchanges
        self._in_order = in_order
        self._first_step = first_step
        self._limit = None if first_step and not in_order else in_flight
        self._stages = sorted({action.stage for action in actions})
        # Boundaries whose layouts this rank knows. A source stage knows its own after its first forward.
        self._known: set[tuple[int, int, bool]] = set()
        self._began: set[int] = set()
        # Receives that wait for a layout, and all receives after them from the same rank.
        self._due: defaultdict[tuple[int, ActionKind], deque[Action]] = defaultdict(deque)
        self._posted: set[Action] = set()
        self._sent: defaultdict[tuple[int, int | None, ActionKind], deque[Action]] = defaultdict(deque)

    def __iter__(self) -> Iterator[Call]:
        for action in self._actions:
            if action.kind in _RECEIVES:
                for receive in self._exchanges.each(action):
                    yield from self._post(action, receive)
            elif action.kind in _SENDS:
                for send in self._exchanges.each(action):
                    yield from self._send(action, send)
            elif action.kind in _SEND_OF:
                yield from self._wait_sent(action, action._replace(kind=_SEND_OF[action.kind]))
            elif action.kind in ADDED:
                yield Call(CallKind.COLLECTIVE, action)
            else:
                yield from self._compute(action)
        for queue in self._sent.values():
            for receive in queue:
                yield Call(CallKind.WAIT_SENT, self._actions[-1], (receive,))

    def _post(self, action: Action, receive: Action) -> Iterator[Call]:
        if not self._first_step:
            yield Call(CallKind.POST, action, (receive,))
            return
        if self._in_order:
            yield from self._learn(action, receive)
            yield self._post_now(action, receive)
            return
        queue = self._queue(receive)
        queue.append(receive)
        while queue and self._is_known(queue[0]):
            yield self._post_now(action, queue.popleft())

    def _compute(self, action: Action) -> Iterator[Call]:
        stage = action.stage
        receives = self._exchanges.receives(action)
        if self._first_step:
            if action.kind is ActionKind.FORWARD and stage not in self._began:
                # Layouts of received values, and of those whose shapes the stage reads. The latter may come from any
                # earlier stage. To wait for the stage before is to wait for all of them.
                for source in self._remote({*self._exchanges.sources(stage), stage - 1}):
                    yield from self._wait_metadata(action, (source, stage, False))
            for receive in receives:
                if receive not in self._posted:
                    yield from self._post_up_to(action, receive)
        of_gradients = [
            boundary
            for receive in receives
            if self._first_step
            and receive.kind is ActionKind.RECEIVE_GRADIENT
            and (boundary := self._boundary(receive, True)) not in self._known
        ]
        for boundary in of_gradients:
            yield from self._wait_metadata(action, boundary)
        yield Call(CallKind.COMPUTE, action, receives)
        if self._first_step and action.kind is ActionKind.FORWARD and stage not in self._began:
            self._began.add(stage)
            for destination in self._remote({*self._exchanges.destinations(stage), stage + 1}):
                self._known.add((stage, destination, False))
                yield Call(CallKind.SEND_METADATA, action, (), (stage, destination, False))

    def _send(self, action: Action, send: Action) -> Iterator[Call]:
        receive = matching_receive(send)
        if self._first_step and send.kind is ActionKind.SEND_GRADIENT:
            boundary = self._boundary(receive, True)
            if boundary not in self._known:
                self._known.add(boundary)
                yield Call(CallKind.SEND_METADATA, action, (), boundary)
        yield Call(CallKind.SEND, action, (receive,))
        queue = self._sent[send.stage, send.peer, send.kind]
        queue.append(receive)
        if self._limit is not None and len(queue) > self._limit:
            yield Call(CallKind.WAIT_SENT, action, (queue.popleft(),))

    def _wait_sent(self, action: Action, send: Action) -> Iterator[Call]:
        queue = self._sent[send.stage, send.peer, send.kind]
        receive = matching_receive(send)
        if receive in queue:
            queue.remove(receive)
            yield Call(CallKind.WAIT_SENT, action, (receive,))

    def _post_up_to(self, action: Action, receive: Action) -> Iterator[Call]:
        queue = self._queue(receive)
        while receive not in self._posted:
            yield from self._learn(action, queue[0])
            yield self._post_now(action, queue.popleft())

    def _post_now(self, action: Action, receive: Action) -> Call:
        self._posted.add(receive)
        return Call(CallKind.POST, action, (receive,))

    def _learn(self, action: Action, receive: Action) -> Iterator[Call]:
        if not self._is_known(receive):
            yield from self._wait_metadata(action, self._boundary(receive, False))

    def _wait_metadata(self, action: Action, boundary: tuple[int, int, bool]) -> Iterator[Call]:
        if boundary not in self._known:
            self._known.add(boundary)
            yield Call(CallKind.WAIT_METADATA, action, (), boundary)

    def _remote(self, stages: set[int]) -> list[int]:
        """Return those of ``stages`` that are on other ranks."""
        return [stage for stage in sorted(stages) if 0 <= stage < self._exchanges.stages and stage not in self._stages]

    def _is_known(self, receive: Action) -> bool:
        return self._boundary(receive, False) in self._known

    def _queue(self, receive: Action) -> deque[Action]:
        assert receive.peer is not None, "each has a peer"
        return self._due[self._exchanges.rank_of[receive.peer], receive.kind]

    @staticmethod
    def _boundary(receive: Action, of_gradients: bool) -> tuple[int, int, bool]:
        """Return the boundary of a transfer. The stage that receives activations is its destination."""
        assert receive.peer is not None, "each has a peer"
        if receive.kind is ActionKind.RECEIVE_ACTIVATION:
            return receive.peer, receive.stage, of_gradients
        return receive.stage, receive.peer, of_gradients
