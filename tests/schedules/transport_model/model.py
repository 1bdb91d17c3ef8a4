"""Model of the transport: the events of a step on all ranks, and which waits for which.

A rank has a host, a compute stream and communicators. Under NCCL the host starts work on the device and goes on::

    host           POST 1F0   COMPUTE 1F0            SEND 1F0   POST 1F1 ...
    compute                   waits for the receive, computes
    communicator   receives                          waits for the computation, sends

- A queue (the compute stream, a communicator) runs its work in the order of the calls. A send or receive begins after
  all that the compute stream had been given before it. With one hardware queue, all that is given later comes after it.
- A send ends together with its receive (rendezvous). That is so for messages larger than the backend's buffers.
- With lazy communicators the first message of two ranks in a group stops both hosts until the other comes to it.
- A sum of tied weights is one event of all ranks that have one. Other exchanges of participants are with replicas,
  which run the same actions: each is an event of its own rank.
- The host waits for the device where a forward asks it, where it synchronises, and at the end of a step.
- Under gloo the host computes, and waits for receives and sends itself. Each message has a queue of its own.

The wait graph does not depend on the speed of the ranks. It has a circle if and only if the ranks wait forever.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.lowering.lowering import Exchanges
from nxdpp.schedules.lowering.transport_rules import RankPair, TransportRules, neighbouring_pairs
from tests.schedules.transport_model.rank_calls import Call, CallKind, RankCalls
from tests.schedules.transport_model.situation import Backend, Situation, Synchronises
from tests.schedules.transport_model.wait_graph import START, Event, WaitGraph

# A communicator, equal on all of its ranks.
Communicator = tuple[Any, ...]


class Programs(NamedTuple):
    """Programs of all ranks.

    ``in_flight`` is the limit of sends in flight from a stage to another in later steps; ``None`` for none.
    """

    ranks: Sequence[Sequence[Action]]
    exchanges: Exchanges
    rules: TransportRules
    in_flight: int | None


class Model:
    """The events of a step of ``programs`` over ``backend`` in ``situation``."""

    def __init__(self, programs: Programs, backend: Backend, situation: Situation) -> None:
        self.graph = WaitGraph()
        self.programs = programs
        self.backend = backend
        self.situation = situation
        self.neighbours = frozenset(neighbouring_pairs(len(programs.ranks))) if programs.rules.pair_groups else ()
        self._transfers: dict[Action, Event] = {}
        self._metadata: dict[tuple[int, int, bool], tuple[Event, Event]] = {}
        self._creations: dict[Communicator, Event] = {}
        self._streams: dict[tuple[Communicator, RankPair], tuple[list[Action], list[Action]]] = {}
        # The format of a name and its values: a name is written for a deadlock alone.
        self._names: list[tuple[Any, ...]] = [("the start",)]
        self.sum_of_ties = self.event(("the sum of tied weights",))
        for rank, actions in enumerate(programs.ranks):
            _RankEvents(self, rank).add(
                RankCalls(
                    actions,
                    programs.exchanges,
                    programs.rules.posted_ahead is None,
                    situation.first_step,
                    programs.in_flight,
                )
            )

    def check(self) -> None:
        """Raise ``ScheduleError`` if ranks wait for each other forever, or messages are taken for others."""
        for (_, (source, destination)), (sent, received) in self._streams.items():
            if sent != received:
                here, there = next(pair for pair in zip(sent, received, strict=False) if pair[0] != pair[1])
                raise ScheduleError(f"rank {destination} takes {here} of rank {source} for {there}.")
        if circle := self.graph.circle():
            names = [form.format(*values) for form, *values in map(self._names.__getitem__, circle)]
            waits = (f"{here} waits for {there}" for here, there in zip(names, names[1:] + names[:1], strict=True))
            raise ScheduleError(f"deadlock: {'; '.join(waits)}.")

    def event(self, name: tuple[Any, ...], *before: Event) -> Event:
        """Add an event. ``name`` is a format and its values, for the message of a deadlock."""
        self._names.append(name)
        return self.graph.event(*before)

    def transfer(self, receive: Action) -> Event:
        """The end of a transfer, for both of its ranks."""
        event = self._transfers.get(receive)
        if event is None:
            assert receive.peer is not None, "each has a peer"
            rank_of = self.programs.exchanges.rank_of
            name = ("the message from rank {} to rank {} ({})", rank_of[receive.peer], rank_of[receive.stage], receive)
            event = self._transfers[receive] = self.event(name)
        return event

    def metadata(self, boundary: tuple[int, int, bool]) -> tuple[Event, Event]:
        """The events of metadata: it is sent, and it is received."""
        if boundary not in self._metadata:
            source, destination = boundary[boundary[2]], boundary[not boundary[2]]
            self._metadata[boundary] = (
                self.event(("the metadata of stage {} for stage {}", source, destination)),
                self.event(("the end of the metadata of stage {} for stage {}", source, destination)),
            )
        return self._metadata[boundary]

    def creation(self, communicator: Communicator, ranks: tuple[int, int]) -> Event:
        """The making of a communicator."""
        if communicator not in self._creations:
            name = ("the making of a communicator of ranks {} and {}", min(ranks), max(ranks))
            self._creations[communicator] = self.event(name)
        return self._creations[communicator]

    def stream(self, communicator: Communicator, ranks: RankPair) -> tuple[list[Action], list[Action]]:
        """The messages between two ranks in ``communicator``, as receives: those sent, and those received, in order."""
        return self._streams.setdefault((communicator, ranks), ([], []))


class _RankEvents:
    """The events of one rank."""

    def __init__(self, model: Model, rank: int) -> None:
        self._model = model
        self._rank = rank
        situation = model.situation
        synchronises = situation.synchronises if situation.on_rank in (None, rank) else Synchronises.NEVER
        self._on_host = model.backend is Backend.GLOO
        self._blocking = synchronises is Synchronises.ALWAYS and not self._on_host
        self._first_synchronises = synchronises is Synchronises.FIRST_MICROBATCH and not self._on_host
        # The last event of the host, of the compute stream, and of each communicator.
        self._host = START
        self._computed = START
        self._queues: defaultdict[Communicator, Event] = defaultdict(lambda: START)
        self._metadata_sends: deque[Event] = deque()

    def add(self, calls: RankCalls) -> None:
        handlers = {
            CallKind.POST: self._post,
            CallKind.COMPUTE: self._compute,
            CallKind.SEND: self._send,
            CallKind.WAIT_SENT: self._wait_sent,
            CallKind.SEND_METADATA: self._send_metadata,
            CallKind.WAIT_METADATA: self._wait_metadata,
            CallKind.COLLECTIVE: self._collective,
        }
        for last in calls:
            handlers[last.kind](last)
        self._host = self._event("ends its step with", last.action, self._host, self._computed, *self._metadata_sends)

    def _post(self, call: Call) -> None:
        (receive,) = call.transfers
        assert receive.peer is not None, "each has a peer"
        self._start(call, receive, self._model.programs.exchanges.rank_of[receive.peer], self._rank)

    def _send(self, call: Call) -> None:
        (receive,) = call.transfers
        self._start(call, receive, self._rank, self._model.programs.exchanges.rank_of[receive.stage])

    def _start(self, call: Call, receive: Action, source: int, destination: int) -> None:
        """Start this rank's part of a transfer."""
        model = self._model
        transfer = model.transfer(receive)
        if self._on_host:
            model.graph.wait(transfer, (self._host,))
            return
        communicator, exists = self._communicator(receive, source, destination)
        if not exists and communicator not in self._queues:
            made = model.creation(communicator, (source, destination))
            model.graph.wait(made, (self._host,))
            self._host = self._event("makes a communicator for", call.action, made)
        model.stream(communicator, (source, destination))[source != self._rank].append(receive)
        # Both parts of the transfer are one event. Each adds what its own rank has before it.
        model.graph.wait(transfer, (self._host, self._computed, self._queues[communicator]))
        self._queues[communicator] = transfer
        if model.situation.one_queue:
            self._computed = transfer
        if self._blocking:
            self._host = transfer

    def _compute(self, call: Call) -> None:
        action, model = call.action, self._model
        transfers = [model.transfer(receive) for receive in call.transfers]
        self._computed = self._event("computes", action, self._host, self._computed, *transfers)
        asks = model.situation.asks and action.kind is ActionKind.FORWARD
        if self._on_host or self._blocking or asks:
            self._host = self._computed
        if self._first_synchronises and action.microbatch == 0:
            self._host = self._event("synchronises in", action, self._host, self._computed, *self._queues.values())

    def _collective(self, call: Call) -> None:
        """Take part in an exchange, which later work of the device follows."""
        action, model = call.action, self._model
        event = self._event("takes part in", action, self._host, self._computed)
        if action.kind is ActionKind.SUM_TIES:
            model.graph.wait(model.sum_of_ties, (event,))
            event = model.sum_of_ties
        self._computed = event
        if self._on_host or self._blocking:
            self._host = event

    def _wait_sent(self, call: Call) -> None:
        if self._blocking:
            # It waited for the end of the send already.
            return
        (receive,) = call.transfers
        self._computed = self._event(
            "needs the end of a send at", call.action, self._host, self._computed, self._model.transfer(receive)
        )
        if self._on_host:
            self._host = self._computed

    def _send_metadata(self, call: Call) -> None:
        assert call.boundary is not None, "metadata is that of a boundary"
        sent, received = self._model.metadata(call.boundary)
        self._model.graph.wait(sent, (self._host,))
        self._metadata_sends.append(received)

    def _wait_metadata(self, call: Call) -> None:
        assert call.boundary is not None, "metadata is that of a boundary"
        sent, received = self._model.metadata(call.boundary)
        self._host = self._event("needs metadata at", call.action, self._host, sent)
        self._model.graph.wait(received, (self._host,))

    def _communicator(self, receive: Action, source: int, destination: int) -> tuple[Communicator, bool]:
        """Return the communicator of a transfer, and whether it exists before the step."""
        model = self._model
        if (source, destination) in model.neighbours:
            return (source, destination), True
        group: Communicator = (source < destination,)
        if not model.programs.rules.pair_groups:
            group = (receive.kind, *group)
        if model.backend is Backend.NCCL_EAGER:
            return group, True
        return (*group, min(source, destination), max(source, destination)), not model.situation.first_step

    def _event(self, what: str, action: Action, *before: Event) -> Event:
        return self._model.event(("rank {} ({} {})", self._rank, what, action), *before)
