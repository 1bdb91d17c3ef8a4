"""Exchanges of gradients and parameters among the replicas of a layout: seconds and bytes of each one alone.

``schedules.execution`` knows where they are in a step, and what computations hide.
"""

import math
from collections.abc import Mapping, Sequence

from nxdpp.devices.collective_bytes import Kind, least_sent, least_steps
from nxdpp.planning.layer_times import BUCKET_BYTES
from nxdpp.planning.layout import SHARDED, Layout
from nxdpp.planning.machine import Machine
from nxdpp.planning.stage_costs import Itemsizes, RankState
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.execution import ExchangeTimes


class ReplicaCollectives:
    """Exchanges of the replicas of one layout on one machine."""

    def __init__(self, machine: Machine, layout: Layout, sizes: Itemsizes) -> None:
        self._layout = layout
        self._sizes = sizes
        self.hides = machine.device.kind != "cpu"
        # Ranks that have the same parameters, and the slowest link between them: first of experts, then of all others.
        self._groups = (
            (layout.copies, machine.link_of(layout.copies, layout.tensor * layout.experts)),
            (layout.data, machine.link_of(layout.data, layout.tensor)),
        )

    def seconds(self, kind: Kind, whole: float, state: RankState) -> float:
        """Return the seconds of collectives of ``whole`` bytes, in buckets, with the share of experts of ``state``."""
        found, experts = 0.0, whole * state.experts.weights / max(state.weights, 1)
        for part, (ranks, link) in zip((experts, whole - experts), self._groups, strict=True):
            if ranks > 1 and part:
                steps = least_steps(kind, ranks) * math.ceil(part / BUCKET_BYTES)
                found += least_sent(kind, part, ranks) / link.rate(kind) + steps * link.latency
        return found

    def gather(self, state: RankState, share: float = 1.0) -> float:
        """Return the seconds of an all-gather of the weights of ``state``, or of a ``share``."""
        return self.seconds("all_gather", share * state.weights, state)

    def scatter(self, state: RankState, share: float = 1.0) -> float:
        """Return the seconds of a reduce-scatter of the gradients of ``state``, or of a ``share``."""
        return self.seconds("reduce_scatter", share * state.gradients * self._sizes.to_gradient, state)

    def of_stages(self, states: Sequence[RankState]) -> Mapping[ActionKind, Sequence[ExchangeTimes]]:
        """Return the exchanges of the actions that a step has, of each of the stages in ``states``."""
        if self._layout.zero > SHARDED:
            return {
                ActionKind.GATHER: [ExchangeTimes(self.gather(state)) for state in states],
                ActionKind.RESHARD: [ExchangeTimes(self.scatter(state)) for state in states],
            }
        kind: Kind = "reduce_scatter" if self._layout.zero else "all_reduce"
        reductions = [self._reduction(kind, state) for state in states]
        return {
            ActionKind.AVERAGE: reductions,
            ActionKind.REDUCE: reductions,
            ActionKind.GATHER: [self._first_gather(state) for state in states],
        }

    def _first_gather(self, state: RankState) -> ExchangeTimes:
        """Two units are gathered ahead, the others under the first forward, which waits for the first unit."""
        ahead = min(state.rest + state.unit if state.rest else 2 * state.unit, state.weights)
        head = min(state.rest + state.unit, ahead) if self.hides else ahead
        first, begun, rest = (self.seconds("all_gather", part, state) for part in (head, ahead, state.weights - ahead))
        return ExchangeTimes(begun + rest, first, begun)

    def _reduction(self, kind: Kind, state: RankState) -> ExchangeTimes:
        """Buckets are sent one after the other. The one of the first layer is ready at the end of the backward."""
        whole = state.gradients * self._sizes.to_gradient
        tail = self.seconds(kind, min(whole, BUCKET_BYTES), state)
        return ExchangeTimes(self.seconds(kind, whole, state), tail=tail)

    def after_schedule(self, state: RankState, share: float = 1.0) -> float:
        """Return the seconds of the exchange of ZeRO-1, of the trained parameters of ``state``, or of a ``share``."""
        if self._layout.zero != 1:
            return 0.0
        return self.scatter(state, share) + self.seconds("all_gather", share * state.gradients, state)

    def least_in_schedule(self, state: RankState, microbatches: int, work: float, share: float = 1.0) -> float:
        """Return the least seconds of ``work`` seconds of a rank's schedule and its exchanges."""
        if self._layout.zero <= SHARDED:
            return work
        exchange = microbatches * (2 * self.gather(state, share) + self.scatter(state, share))
        return max(work, exchange) if self.hides else work + exchange

    def sent(self, state: RankState, microbatches: int, split_share: float) -> float:
        """Return the least bytes that a rank sends to replicas in a step; ``split_share`` of backwards gather twice."""
        # All but the part that a rank keeps.
        others, gradients = state.gradients - state.part("gradients", self._layout), self._sizes.to_gradient
        scattered = others * gradients
        if self._layout.zero == 0:
            return 2 * scattered
        if self._layout.zero == 1:
            return scattered + others
        gathered = state.weights - state.part("weights", self._layout)
        if self._layout.zero == SHARDED:
            return scattered + gathered
        return microbatches * (scattered + (2 + split_share) * gathered)
