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
        # The slowest link of a data-parallel group.
        self._link = machine.link_of(layout.data, layout.tensor)

    def seconds(self, kind: Kind, whole: float) -> float:
        """Return the seconds of collectives of ``whole`` bytes, in buckets."""
        ranks = self._layout.data
        if ranks == 1 or not whole:
            return 0.0
        steps = least_steps(kind, ranks) * math.ceil(whole / BUCKET_BYTES)
        return least_sent(kind, whole, ranks) / self._link.rate(kind) + steps * self._link.latency

    def gather(self, weights: float) -> float:
        """Return the seconds of an all-gather of ``weights`` bytes."""
        return self.seconds("all_gather", weights)

    def scatter(self, gradients: float) -> float:
        """Return the seconds of a reduce-scatter of the gradients of parameters of ``gradients`` bytes."""
        return self.seconds("reduce_scatter", gradients * self._sizes.to_gradient)

    def of_stages(self, states: Sequence[RankState]) -> Mapping[ActionKind, Sequence[ExchangeTimes]]:
        """Return the exchanges of the actions that a step has, of each of the stages in ``states``."""
        if self._layout.zero > SHARDED:
            return {
                ActionKind.GATHER: [ExchangeTimes(self.gather(state.weights)) for state in states],
                ActionKind.RESHARD: [ExchangeTimes(self.scatter(state.gradients)) for state in states],
            }
        kind: Kind = "reduce_scatter" if self._layout.zero else "all_reduce"
        reductions = [self._reduction(kind, state.gradients * self._sizes.to_gradient) for state in states]
        return {
            ActionKind.AVERAGE: reductions,
            ActionKind.REDUCE: reductions,
            ActionKind.GATHER: [self._first_gather(state) for state in states],
        }

    def _first_gather(self, state: RankState) -> ExchangeTimes:
        """Two units are gathered ahead, the others under the first forward, which waits for the first unit."""
        ahead = min(state.rest + state.unit if state.rest else 2 * state.unit, state.weights)
        head = min(state.rest + state.unit, ahead) if self.hides else ahead
        rest = self.gather(state.weights - ahead)
        return ExchangeTimes(self.gather(ahead) + rest, self.gather(head), self.gather(ahead))

    def _reduction(self, kind: Kind, whole: float) -> ExchangeTimes:
        """Buckets are sent one after the other. The one of the first layer is ready at the end of the backward."""
        return ExchangeTimes(self.seconds(kind, whole), tail=self.seconds(kind, min(whole, BUCKET_BYTES)))

    def after_schedule(self, gradients: float) -> float:
        """Return the seconds of the exchange of ZeRO-1, of parameters of ``gradients`` bytes."""
        return self.scatter(gradients) + self.gather(gradients) if self._layout.zero == 1 else 0.0

    def least_in_schedule(self, weights: float, gradients: float, microbatches: int, work: float) -> float:
        """Return the least seconds of ``work`` seconds of a rank's schedule and its exchanges."""
        if self._layout.zero <= SHARDED:
            return work
        exchange = microbatches * (2 * self.gather(weights) + self.scatter(gradients))
        return max(work, exchange) if self.hides else work + exchange

    def sent(self, state: RankState, microbatches: int, split_share: float) -> float:
        """Return the least bytes that a rank sends to replicas in a step; ``split_share`` of backwards gather twice."""
        data, gradients = self._layout.data, state.gradients * self._sizes.to_gradient
        scattered = least_sent("reduce_scatter", gradients, data)
        if self._layout.zero == 0:
            return least_sent("all_reduce", gradients, data)
        if self._layout.zero == 1:
            return scattered + least_sent("all_gather", state.gradients, data)
        gathered = least_sent("all_gather", state.weights, data)
        if self._layout.zero == SHARDED:
            return scattered + gathered
        return microbatches * (scattered + (2 + split_share) * gathered)
