"""Lower bounds of time and memory of layouts, without a simulation.

::

    group    sizes, microbatch, switches       the work of all layers, spread evenly over the ranks
    layout   group and schedule                the work of the slowest rank after the first forwards reach it
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nxdpp.devices.collective_bytes import least_sent
from nxdpp.planning.layer_times import LayerTimes
from nxdpp.planning.layout import Layout
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import states_of
from nxdpp.planning.rank_memory import rank_memory
from nxdpp.planning.stage_costs import StageCosts, stage_costs, stage_ends
from nxdpp.planning.step_times import data_link
from nxdpp.schedules.families.registry import find_family

# Families of full backwards: a rank's last backward is of its first stage.
_ENDS_WITH_BACKWARDS = frozenset({"gpipe", "1f1b", "1f1b-eager", "interleaved", "looped-bfs"})


@dataclass(frozen=True)
class Bounds:
    """Least seconds of a step, and least bytes of the rank that needs the most."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class _Totals:
    """Sums over all layers, for one microbatch on one rank without a pipeline."""

    work: float
    recomputed: float
    held: float
    held_recomputed: float
    weights: float
    gradients: float
    optimizer: float
    sharded: float

    @classmethod
    def of(cls, layers: Sequence[LayerTimes]) -> "_Totals":
        again = [layer for layer in layers if layer.is_layer]
        return cls(
            work=sum(layer.work for layer in layers),
            recomputed=sum(layer.forward + layer.forward_tensor for layer in again),
            held=sum(layer.held for layer in layers),
            held_recomputed=sum(layer.taken if layer.is_layer else layer.held for layer in layers),
            weights=sum(layer.weights for layer in layers),
            gradients=sum(layer.gradients for layer in layers),
            optimizer=sum(layer.optimizer for layer in layers),
            sharded=sum(layer.sharded for layer in layers),
        )


class LowerBounds:
    """Bounds of layouts of one model on one machine."""

    def __init__(self, costs: ModelCosts) -> None:
        self._costs = costs
        self._totals: dict[tuple[int, bool, int], _Totals] = {}
        self._stages: dict[tuple[int, bool, int, bool, int], list[StageCosts]] = {}

    def of_undivided(self, layout: Layout) -> Bounds:
        """Return bounds of a group from the model that no tensor group divides, shared evenly by the group."""
        return self._of_group(layout, self._total(1, False, layout.microbatch), layout.tensor)

    def of_group(self, layout: Layout) -> Bounds:
        """Return bounds of all schedules of ``layout``. Raises ``ValueError`` where the model cannot be divided."""
        return self._of_group(layout, self._total(layout.tensor, layout.sequence, layout.microbatch), 1)

    def _of_group(self, layout: Layout, one: _Totals, share: int) -> Bounds:
        work, held = one.work, one.held
        if layout.checkpoint:
            work, held = one.work + one.recomputed, one.held_recomputed
        ranks = share * layout.pipeline
        microbatches = layout.microbatches(self._costs.job.global_batch)
        shared = layout.zero1 and layout.data > 1
        state = one.weights + one.gradients + (one.sharded / layout.data if shared else one.optimizer)
        # Gradients may come after the peak of the activations.
        held = max(held - one.gradients, 0.0)
        gradients = one.gradients / ranks
        exchange = 2 * least_sent("all_gather", gradients, layout.data) if shared else 0.0
        seconds = microbatches * work / ranks + exchange / data_link(self._costs.machine, layout).bytes_per_second
        return Bounds(seconds, (state + held) / ranks)

    def _total(self, tensor: int, sequence: bool, microbatch: int) -> _Totals:
        key = (tensor, sequence, microbatch)
        if key not in self._totals:
            self._totals[key] = _Totals.of(self._costs.of(*key).layers)
        return self._totals[key]

    def of_layout(self, layout: Layout) -> Bounds:
        """Return bounds of ``layout`` with its cuts."""
        model = self._costs.of(layout.tensor, layout.sequence, layout.microbatch)
        stages = self._cut(layout)
        placement = find_family(layout.schedule).placement(layout.pipeline, layout.chunks)
        microbatches = layout.microbatches(self._costs.job.global_batch)
        states, _ = states_of(self._costs, layout, stages)
        machine, itemsize = self._costs.machine, self._costs.dtype.itemsize
        ends_with_backwards = layout.schedule in _ENDS_WITH_BACKWARDS
        before = seconds = most = 0.0
        for rank in range(layout.pipeline):
            own = [stages[stage] for stage in placement.stages_of(rank)]
            # A rank begins after the first forwards of the stages before it, and full backwards of these follow it.
            seconds = max(seconds, before + microbatches * sum(stage.work for stage in own))
            before += stages[rank].work if ends_with_backwards else stages[rank].forward
            held = least_held(layout, rank, microbatches, own)
            # Gradients may come after the peak of the activations.
            activations = max(held - states[rank].gradients, 0.0)
            memory = rank_memory(layout, states[rank], activations, machine.device.kind, itemsize, model.message)
            most = max(most, memory.total)
        state = max(states, key=lambda each: each.gradients)
        if layout.zero1 and layout.data > 1:
            exchange = 2 * least_sent("all_gather", state.gradients, layout.data)
            seconds += exchange / data_link(machine, layout).bytes_per_second
        return Bounds(seconds, most)

    def _cut(self, layout: Layout) -> list[StageCosts]:
        key = (layout.tensor, layout.sequence, layout.microbatch, layout.checkpoint, layout.stages)
        if key not in self._stages:
            model = self._costs.of(layout.tensor, layout.sequence, layout.microbatch)
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
