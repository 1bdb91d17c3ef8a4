"""Lower bounds of time and memory of layouts, without a simulation.

::

    group    sizes, microbatch, switches       the work of all layers, spread evenly over the ranks
    layout   group and schedule                the work of the slowest rank after the first forwards reach it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nxdpp.devices.kinds import has_streams
from nxdpp.planning.layout import Layout
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import states_of
from nxdpp.planning.rank_memory import rank_memory, stage_bytes
from nxdpp.planning.replica_collectives import ReplicaCollectives
from nxdpp.planning.stage_costs import RankState, StageCosts, largest_sent, rank_state, stage_costs, stage_ends
from nxdpp.schedules.families.registry import find_family

# Families of full backwards: a rank's last backward is of its first stage.
_ENDS_WITH_BACKWARDS = frozenset({"gpipe", "1f1b", "1f1b-eager", "interleaved", "looped-bfs"})


@dataclass(frozen=True)
class Bounds:
    """Least seconds of a step, and least bytes of the rank that needs the most."""

    seconds: float
    bytes: float


class LowerBounds:
    """Bounds of layouts of one model on one machine."""

    def __init__(self, costs: ModelCosts) -> None:
        self._costs = costs
        self._groups: dict[tuple[int, bool, int, int, bool], tuple[StageCosts, RankState]] = {}
        self._stages: dict[Layout, list[StageCosts]] = {}

    def of_undivided(self, layout: Layout) -> Bounds:
        """Return bounds of a group from the model that no tensor group divides, shared evenly by the group."""
        return self._of_group(layout, 1, False, layout.tensor)

    def of_group(self, layout: Layout) -> Bounds:
        """Return bounds of all schedules of ``layout``. Raises ``ValueError`` where the model cannot be divided."""
        return self._of_group(layout, layout.tensor, layout.sequence, 1)

    def _of_group(self, layout: Layout, tensor: int, sequence: bool, share: int) -> Bounds:
        key = (tensor, sequence, layout.microbatch, layout.experts, layout.checkpoint)
        if key not in self._groups:
            model = self._costs.of(*key[:4])
            (one,) = stage_costs(model, [len(model.layers)], layout.checkpoint, 0.0)
            self._groups[key] = one, rank_state(model, [one])
        one, state = self._groups[key]
        ranks = share * layout.pipeline
        microbatches = layout.microbatches(self._costs.job.global_batch)
        sizes, machine = self._costs.itemsizes, self._costs.machine
        # Gradients may come after the peak of the activations.
        part = stage_bytes(layout, state, sizes, has_streams(machine.device.kind))
        held = max(one.held + part.gathered - part.gradients, 0.0)
        memory = rank_memory(layout, state, held, machine.device.kind, sizes, 0.0)
        exchanges = ReplicaCollectives(machine, layout, sizes)
        # A pipeline may hide messages of tokens.
        least_work = one.work - (2 * one.exchange if layout.pipeline > 1 else 0.0)
        work = exchanges.least_in_schedule(state, microbatches, microbatches * least_work / ranks, 1 / ranks)
        least = memory.weights + memory.gradients + memory.optimizer + held
        return Bounds(work + exchanges.after_schedule(state, 1 / ranks), least / ranks)

    def of_layout(self, layout: Layout) -> Bounds:
        """Return bounds of ``layout`` with its cuts."""
        stages = self._cut(layout)
        placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
        microbatches = layout.microbatches(self._costs.job.global_batch)
        states, _ = states_of(self._costs, layout, stages)
        machine, sizes = self._costs.machine, self._costs.itemsizes
        exchanges = ReplicaCollectives(machine, layout, sizes)
        ends_with_backwards = layout.schedule in _ENDS_WITH_BACKWARDS
        hidden = 2 if find_family(layout.schedule).overlaps else 0
        before = seconds = most = 0.0
        for rank in range(layout.pipeline):
            own = [stages[stage] for stage in placement.stages_of(rank)]
            # A rank begins after the first forwards of the stages before it, and full backwards of these follow it.
            work = microbatches * sum(stage.work - hidden * stage.exchange for stage in own)
            state = states[rank]
            work = exchanges.least_in_schedule(state, microbatches, work)
            seconds = max(seconds, before + work)
            before += stages[rank].work if ends_with_backwards else stages[rank].forward
            held = least_held(layout, rank, microbatches, own)
            # Gradients may come after the peak of the activations.
            part = stage_bytes(layout, state, sizes, has_streams(machine.device.kind))
            activations = max(held + part.gathered - part.gradients, 0.0)
            memory = rank_memory(layout, state, activations, machine.device.kind, sizes, largest_sent(stages))
            most = max(most, memory.total)
        return Bounds(seconds + max(map(exchanges.after_schedule, states)), most)

    def _cut(self, layout: Layout) -> list[StageCosts]:
        key = replace(layout, pipeline=layout.stages, data=1, chunks=1, schedule="", zero=0)
        if key not in self._stages:
            model = self._costs.of(layout.tensor, layout.sequence, layout.microbatch, layout.experts)
            ends = stage_ends(model, layout.stages, layout.checkpoint)
            action = self._costs.machine.device.action_seconds
            self._stages[key] = stage_costs(model, ends, layout.checkpoint, action)
        return self._stages[key]


def least_held(layout: Layout, rank: int, microbatches: int, stages: Sequence[StageCosts]) -> float:
    """Return the bytes for ``stages`` of ``rank``; a lower bound of the peak over the schedule's actions."""
    everything = sum(stage.held for stage in stages)
    if layout.schedule in ("gpipe", "looped-bfs"):
        return microbatches * everything
    # The forwards of a rank before its first backward.
    p, v, behind = layout.pipeline, layout.chunks, layout.pipeline - rank
    chunks = {
        "1f1b": behind,
        "1f1b-eager": 2 * behind - 1,
        "zb-h1": behind,
        "interleaved": 2 * (behind - 1) + (v - 1) * min(p, microbatches) + 1,
        "zb1p": behind + (v - 1) * min(p, microbatches),
        "zb-v": 2 * p - 1,
        "dualpipe-v": 2 * p,
        "v-half": p // 2,
        "v-min": p // 3,
    }.get(layout.schedule, 1)
    least = min(stage.held for stage in stages)
    return max(min(chunks, v * microbatches) * least, everything / v)
