"""Execution of a schedule in simulated time: each action starts as soon as its rank and its inputs are ready.

A forward needs the forward of the stage before, a backward or input-gradient the backward of the stage behind. Tensors
that skip stages are ready earlier.

Actions of participants (``lowering.additions``) exchange parameters and gradients over a link of the rank to its
replicas, one after the other, while it computes::

    rank     2GATHER0 ── 2F0 ── 2GATHERED0     the forward begins after the head of the gather; the end waits for all
    link      head ▸ rest ────────┘
    rank     2REDUCE7 ── 2B7 ── 2RESHARD7      nothing waits for a reduction or an average, until the last action does
    link                 ─────── tail ▸

A stage with experts over ranks waits for tokens while it computes. In a pair of a forward and a backward, one computes
while the other waits. The two take turns at each of their exchanges::

    rank     0DISPATCH5 ── 0F5 3B2 0F5 3B2 ... 3COMBINE2
    link                       0F5 3B2 0F5 ...
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from nxdpp.schedules.actions import ADDED, BEGINS, COMPUTE, ENDS, Action, ActionKind, Schedule

# A split backward ends with its weight-gradient.
_ENDS_OF_BACKWARDS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


class ExchangeTimes(NamedTuple):
    """Times of an exchange of a stage.

    Attributes:
        time: of all of it.
        head: of the part for which the compute action waits.
        ahead: of the part that may run before the compute action, as soon as the link is free.
        tail: of the part that begins after the compute action.
    """

    time: float
    head: float = 0.0
    ahead: float = 0.0
    tail: float = 0.0


Turns = Sequence[tuple[float, float]]
"""Of a compute action: times of computation, each with the time of the exchange of tokens after it, which may be 0."""


class Times(NamedTuple):
    """Times of each stage in any unit; item ``s`` of each is for stage ``s``.

    A full backward takes the time of the input- and the weight-gradient, unless ``backward`` has its own. ``transfer``
    is between stage ``s`` and the next one, in either direction, if they are on different ranks. The last item is not
    used. ``exchanges`` are by the kind of the action that begins them; the ones of ``RESHARD`` are reductions after a
    backward. Without ``hides`` an exchange takes its time from the computations. ``tokens`` are the turns of a forward
    and of a backward of each stage; their sums are the times of these.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    transfer: Sequence[float]
    exchanges: Mapping[ActionKind, Sequence[ExchangeTimes]] = MappingProxyType({})
    hides: bool = True
    backward: Sequence[float] | None = None
    tokens: tuple[Sequence[Turns], Sequence[Turns]] | None = None

    @property
    def lengths(self) -> dict[ActionKind, Sequence[float]]:
        """Times of the compute actions of each kind, by stage."""
        both = zip(self.input_gradient, self.weight_gradient, strict=True)
        full = [i + w for i, w in both] if self.backward is None else self.backward
        kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD)
        return dict(zip(kinds, (*self[:3], full), strict=True))

    def around_each(self) -> "Times":
        """Return the times of compute actions that have ``SHARDS_EACH_MICROBATCH`` around each of them.

        A run of them alone is a run with their gathers and reductions, which begin and end with them, in a third of
        the time.
        """
        gathers = [each.time for each in self.exchanges[ActionKind.GATHER]]
        reductions = [each.time for each in self.exchanges[ActionKind.RESHARD]]
        longer: dict[ActionKind, list[float]] = {}
        for kind, lengths in self.lengths.items():
            reduces = kind in _ENDS_OF_BACKWARDS
            each = zip(lengths, gathers, reductions, strict=True)
            longer[kind] = [self.longer(own, 0.0, gather + reduces * reduced) for own, gather, reduced in each]
        forward, input_gradient, weight_gradient, full = longer.values()
        return Times(forward, input_gradient, weight_gradient, self.transfer, backward=full)

    def longer(self, clock: float, start: float, time: float) -> float:
        """Return when a rank at ``clock`` goes on that waits for an exchange that takes ``time`` from ``start``."""
        return max(clock, start + time) if self.hides else clock + time


def taken_in_turns(first: Turns, second: Turns, hides: bool = True) -> tuple[float, float]:
    """Return when each of two actions ends that begin at 0: one computes while the other waits for tokens.

    Exchanges follow one another on the link. The last exchange of an action has nothing after it to wait for it.
    """
    clock = link = 0.0
    ends, arrived, left = [0.0, 0.0], [0.0, 0.0], [list(first), list(second)]
    turn = 0
    while left[0] or left[1]:
        if not left[turn]:
            turn = 1 - turn
        computed, exchanged = left[turn].pop(0)
        clock = max(clock, arrived[turn]) + computed
        if exchanged and hides:
            arrived[turn] = link = max(link, clock) + exchanged
        clock += 0.0 if hides else exchanged
        ends[turn] = max(clock, arrived[turn])
        turn = 1 - turn
    return ends[0], max(ends)


class ScheduleError(ValueError):
    """A schedule that cannot run; the message names the rank, the action and the rule."""


def run_in_order(schedule: Schedule, stages: int, microbatches: int, times: Times | None = None) -> "Execution":
    """Run ``schedule``, all at 0 without ``times``; ``ScheduleError`` if no rank can continue."""
    zeros = [0.0] * stages
    execution = Execution(schedule, stages, microbatches, times or Times(zeros, zeros, zeros, zeros))
    execution.run()
    return execution


class Execution:
    """The run of a schedule. The attributes are of each rank.

    Attributes:
        starts: of each action.
        waits: end of each added action, by its place.
        clocks: end of the last action.
        links: end of the last exchange.
        hidden: time that pairs are shorter than their actions alone.
    """

    def __init__(self, schedule: Schedule, stages: int, microbatches: int, times: Times) -> None:
        self.starts: list[list[float]] = [[] for _ in schedule]
        self.waits: list[dict[int, float]] = [{} for _ in schedule]
        self.clocks = [0.0] * len(schedule)
        self.links = [0.0] * len(schedule)
        self.hidden = [0.0] * len(schedule)
        # Exchanges that have begun on each rank.
        self._begun: list[list[tuple[ActionKind, float, float, float]]] = [[] for _ in schedule]
        self._exchanges = {**dict.fromkeys(ADDED, [ExchangeTimes(0.0)] * stages), **times.exchanges}
        self._schedule = schedule
        self._rank_of: dict[int, int] = {}
        for rank, actions in enumerate(schedule):
            self._rank_of |= dict.fromkeys(map(itemgetter(0), actions), rank)
        self._times = times
        self._full = times.lengths[ActionKind.BACKWARD]
        self._transfer = [
            0.0 if self._rank_of[stage] == self._rank_of.get(stage + 1) else times.transfer[stage]
            for stage in range(stages)
        ]
        # When the activation and the gradient of a microbatch arrive from a stage; -1 before they are computed.
        self._forward = [[-1.0] * microbatches for _ in range(stages)]
        self._backward = [[-1.0] * microbatches for _ in range(stages)]
        # The rank that waits for a tensor of a stage.
        self._waits_for_forward: list[int | None] = [None] * stages
        self._waits_for_backward: list[int | None] = [None] * stages
        self._ready = deque(range(len(schedule)))
        # On each rank the times of the actions of a pair, by their places.
        self._paired: list[dict[int, float]] = [{} for _ in schedule]
        self._begun_pairs = [0.0] * len(schedule)

    def run(self) -> None:
        """Run all actions; raises ``ScheduleError`` where ranks wait for each other."""
        while self._ready:
            self._advance(self._ready.popleft())
        stuck = {
            rank: self._stuck(rank, len(starts))
            for rank, (actions, starts) in enumerate(zip(self._schedule, self.starts, strict=True))
            if len(starts) < len(actions)
        }
        if stuck:
            raise ScheduleError(self._describe(stuck))

    @property
    def ends(self) -> list[list[float]]:
        """End of each action. The last one waits for exchanges that go on after it."""
        lengths = self._times.lengths
        found = []
        of_ranks = zip(self._schedule, self.starts, self.waits, self.links, self._paired, strict=True)
        for actions, starts, waits, link, paired in of_ranks:
            ends = [
                start + paired.get(at, lengths[action.kind][action.stage]) if action.kind in COMPUTE else waits[at]
                for at, (action, start) in enumerate(zip(actions, starts, strict=True))
            ]
            found.append([*ends[:-1], max(ends[-1], link)])
        return found

    @property
    def exposed(self) -> list[float]:
        """Time in which each rank waits for exchanges before ``clocks``."""
        each = zip(self.starts, self.waits, strict=True)
        return [sum(end - starts[at] for at, end in waits.items()) for starts, waits in each]

    def _advance(self, rank: int) -> None:
        """Run actions of ``rank`` until one has to wait. Most of the time of a check is spent here."""
        forward_kind, weight_kind, full_kind = ActionKind.FORWARD, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD
        input_kind = ActionKind.INPUT_GRADIENT
        forward, backward, transfer = self._forward, self._backward, self._transfer
        takes_forward, takes_input, takes_weight, *_ = self._times
        actions, starts, clock, last = self._schedule[rank], self.starts[rank], self.clocks[rank], len(forward) - 1
        paired, begun = self._paired[rank], self._begun_pairs[rank]
        for position in range(len(starts), len(actions)):
            stage, kind, microbatch, _ = actions[position]
            waiter = None
            start = clock
            if kind is forward_kind:
                if stage:
                    there = forward[stage - 1][microbatch]
                    if there < 0:
                        self._waits_for_forward[stage - 1] = rank
                        break
                    start = max(clock, there)
                clock = start + (paired[position] if position in paired else takes_forward[stage])
                forward[stage][microbatch] = clock + transfer[stage]
                waiter = self._waits_for_forward[stage]
                self._waits_for_forward[stage] = None
            elif kind is weight_kind:
                clock = start + takes_weight[stage]
            elif kind is full_kind or kind is input_kind:
                if stage < last:
                    there = backward[stage + 1][microbatch]
                    if there < 0:
                        self._waits_for_backward[stage + 1] = rank
                        break
                    start = max(clock, there)
                if position in paired:
                    start, clock = begun, begun + paired[position]
                else:
                    clock = start + (self._full[stage] if kind is full_kind else takes_input[stage])
                backward[stage][microbatch] = clock + (transfer[stage - 1] if stage else 0.0)
                waiter = self._waits_for_backward[stage]
                self._waits_for_backward[stage] = None
            elif kind is ActionKind.DISPATCH:
                # The inputs of both must be there.
                begins = self._begin_pair(rank, position, clock)
                if begins is None:
                    break
                start = clock = self.waits[rank][position] = begun = begins
            else:
                clock = self.waits[rank][position] = self._exchange(rank, position, clock)
            starts.append(start)
            if waiter is not None:
                self._ready.append(waiter)
        self.clocks[rank], self._begun_pairs[rank] = clock, begun

    def _begin_pair(self, rank: int, position: int, clock: float) -> float | None:
        """Return when the pair after the place of its ``DISPATCH`` begins; ``None`` if an input is not there yet."""
        first, second = self._pair(rank, position)
        forward, backward = (self._schedule[rank][at] for at in (first, second))
        if forward.stage:
            there = self._forward[forward.stage - 1][forward.microbatch]
            if there < 0:
                self._waits_for_forward[forward.stage - 1] = rank
                return None
            clock = max(clock, there)
        if backward.stage + 1 < len(self._forward):
            there = self._backward[backward.stage + 1][backward.microbatch]
            if there < 0:
                self._waits_for_backward[backward.stage + 1] = rank
                return None
            clock = max(clock, there)
        tokens, alone = self._times.tokens, self._times.forward[forward.stage]
        ends = both = alone, alone + self._full[backward.stage]
        if tokens is not None:
            ends = taken_in_turns(tokens[0][forward.stage], tokens[1][backward.stage], self._times.hides)
        self.hidden[rank] += both[1] - ends[1]
        self._paired[rank] |= zip((first, second), ends, strict=True)
        return clock

    def _pair(self, rank: int, position: int) -> tuple[int, int]:
        """Return the places of the two actions after a ``DISPATCH``."""
        actions = self._schedule[rank]
        first, second = islice((at for at in range(position, len(actions)) if actions[at].kind in COMPUTE), 2)
        return first, second

    def _exchange(self, rank: int, position: int, clock: float) -> float:
        """Begin or end the exchange of an added action at ``clock``; return when the rank goes on."""
        actions = self._schedule[rank]
        stage, kind, *_ = actions[position]
        time, head, ahead, tail = self._exchanges[kind][stage]
        if kind in BEGINS:
            self._begun[rank].append((kind, time, ahead, tail))
            self.links[rank] += ahead
            return self._times.longer(clock, self.links[rank] - ahead, head) if head else clock
        if kind not in ENDS:
            return clock + time
        at = position - 1
        while actions[at].kind not in COMPUTE:
            at -= 1
        begun, rest, ahead, tail = self._begun[rank].pop()
        rest -= ahead
        waits, computed = begun is ActionKind.GATHER, actions[at].kind
        if waits and computed in _ENDS_OF_BACKWARDS:
            rest += time
        began = max(self.links[rank], self.starts[rank][at])
        self.links[rank] = began + rest if waits else max(began + rest, clock + tail)
        if not waits and self._times.hides:
            return clock
        end = self._times.longer(clock, began, rest)
        if waits and computed is not ActionKind.WEIGHT_GRADIENT:
            # A computation is over when all that it gathers is there.
            sent = self._forward if computed is ActionKind.FORWARD else self._backward
            sent[stage][actions[at].microbatch] += end - clock
        return end

    def _stuck(self, rank: int, position: int) -> Action:
        """Return the action at ``position``, of a pair the one whose input is missing."""
        action = self._schedule[rank][position]
        if action.kind is not ActionKind.DISPATCH:
            return action
        first, second = (self._schedule[rank][at] for at in self._pair(rank, position))
        return first if first.stage and self._forward[first.stage - 1][first.microbatch] < 0 else second

    def _describe(self, stuck: dict[int, Action]) -> str:
        """Describe one circle of ranks that wait for each other."""
        circle: list[int] = []
        rank = next(iter(stuck))
        while rank not in circle:
            circle.append(rank)
            rank = self._rank_of[_needed(stuck[rank]).stage]
        circle = circle[circle.index(rank) :]
        waits = "; ".join(
            f"rank {rank}, action {len(self.starts[rank])} ({stuck[rank]}) waits for {_needed(stuck[rank])} of rank "
            f"{self._rank_of[_needed(stuck[rank]).stage]}"
            for rank in circle
        )
        return f"deadlock: {waits}."


def _needed(action: Action) -> Action:
    step = -1 if action.kind is ActionKind.FORWARD else 1
    return Action(action.stage + step, action.kind, action.microbatch)
