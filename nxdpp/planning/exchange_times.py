"""Seconds in which replicas exchange gradients and parameters.

::

    ZeRO-0    the average of gradients                     hides under the last backwards
    ZeRO-1    reduce-scatter, step, all-gather             after the schedule; nothing hides it
    ZeRO-2    all-gather before the first forwards, reduce-scatter in the last backwards
    ZeRO-3    all-gather in each forward and backward, in both parts of a split one; reduce-scatter in each backward

On a CPU nothing hides an exchange: it takes its time from the computations.
"""

import math
from collections.abc import Mapping, Sequence

from nxdpp.devices.collective_bytes import Kind, least_sent, least_steps
from nxdpp.planning.layer_times import BUCKET_BYTES
from nxdpp.planning.layout import SHARDED, Layout
from nxdpp.planning.machine import Link, Machine
from nxdpp.planning.stage_costs import Itemsizes, RankState

# Start and end of an action of each stage of a rank.
Spans = dict[int, tuple[float, float]]


def exchange_seconds(kind: Kind, whole: float, ranks: int, link: Link) -> float:
    """Return the seconds of collectives over ``ranks`` ranks for ``whole`` bytes, in buckets."""
    if ranks == 1 or not whole:
        return 0.0
    steps = least_steps(kind, ranks) * math.ceil(whole / BUCKET_BYTES)
    return least_sent(kind, whole, ranks) / link.rate(kind) + steps * link.latency


class ExchangeTimes:
    """Times of the exchanges of the replicas of one layout on one machine."""

    def __init__(self, machine: Machine, layout: Layout, sizes: Itemsizes) -> None:
        self._layout = layout
        self._sizes = sizes
        self._hides = machine.device.kind != "cpu"
        # The slowest link of a data-parallel group.
        self._link = machine.link_of(layout.data, layout.tensor)

    def gather(self, weights: float) -> float:
        """Return the seconds of an all-gather of ``weights`` bytes."""
        return exchange_seconds("all_gather", weights, self._layout.data, self._link)

    def scatter(self, gradients: float) -> float:
        """Return the seconds of a reduce-scatter of the gradients of parameters of ``gradients`` bytes."""
        whole = gradients * self._sizes.to_gradient
        return exchange_seconds("reduce_scatter", whole, self._layout.data, self._link)

    def after_schedule(self, gradients: float) -> float:
        """Return the seconds of the exchange of ZeRO-1, of parameters of ``gradients`` bytes."""
        return self.scatter(gradients) + self.gather(gradients) if self._layout.zero == 1 else 0.0

    def least_in_schedule(self, weights: float, gradients: float, microbatches: int, work: float) -> float:
        """Return the least seconds of ``work`` seconds of a rank's schedule and its exchanges."""
        if self._layout.zero <= SHARDED:
            return work
        exchange = microbatches * (2 * self.gather(weights) + self.scatter(gradients))
        return max(work, exchange) if self._hides else work + exchange

    def longer(self, work: float, exchange: float) -> float:
        """Return the seconds of an action with its exchange."""
        return max(work, exchange) if self._hides else work + exchange

    def gather_delay(self, firsts: Sequence[Spans], states: Sequence[RankState]) -> float:
        """Return the seconds by which the first forwards of a step are late, which wait for their parameters: ZeRO-2.

        Two units are gathered ahead, from the start of the step or under the stage before; the others under the first
        forward of their own stage. What one stage is late, all stages behind it are too.

        Args:
            firsts: of each rank, spans of the first forward of each of its stages.
            states: of each stage.
        """
        if self._layout.zero != SHARDED:
            return 0.0
        if not self._hides:
            return max(sum(self.gather(states[stage].weights) for stage in first) for first in firsts)
        spans = sorted((*span, rank, stage) for rank, first in enumerate(firsts) for stage, span in first.items())
        ready = [0.0] * len(firsts)
        late = 0.0
        for start, end, rank, stage in spans:
            state = states[stage]
            late = max(late, ready[rank] + self.gather(state.rest + state.unit) - start)
            ahead = min(state.rest + state.unit if state.rest else 2 * state.unit, state.weights)
            others = max(ready[rank] + self.gather(ahead), start + late)
            ready[rank] = others + self.gather(state.weights - ahead)
            late = max(late, ready[rank] - end)
        return late

    def reduced_end(self, last: Spans, gradients: Mapping[int, float], end: float) -> float:
        """Return when the gradients of a rank are averaged: ZeRO-0 and 2.

        Buckets are sent one after the other, the first ones during the last backward of their stage.

        Args:
            last: spans of the last backward of each of its stages.
            gradients: bytes of the trained parameters of each stage.
            end: end of the schedule on the rank.
        """
        if self._layout.data == 1 or self._layout.zero not in (0, SHARDED):
            return end
        kind: Kind = "reduce_scatter" if self._layout.zero else "all_reduce"
        whole = {stage: gradients[stage] * self._sizes.to_gradient for stage in last}
        seconds = {stage: self._reduce(kind, each) for stage, each in whole.items()}
        if not self._hides:
            return end + sum(seconds.values())
        finished = 0.0
        for stage, (started, ended) in sorted(last.items(), key=lambda item: item[1][1]):
            # The bucket of the first layer is ready at the end.
            tail = self._reduce(kind, min(whole[stage], BUCKET_BYTES))
            finished = max(max(finished, started) + seconds[stage], ended + tail)
        return max(finished, end)

    def _reduce(self, kind: Kind, whole: float) -> float:
        return exchange_seconds(kind, whole, self._layout.data, self._link)

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
