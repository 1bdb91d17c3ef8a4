"""Search of the layouts with the shortest steps that fit into the memory of a device.

Best first: a heap holds groups of layouts, layouts, and predictions by their least seconds. The smallest is taken:
layouts replace their group, a prediction its layout. So a prediction that is taken is the best of all that remain::

    group (model as it is) -> group (divided model) -> layouts (schedules, chunks) -> predictions

Layouts of equal sizes and switches are one choice: only the best of its microbatches and schedules is kept. All layouts
of a search have optimizers of one precision.
"""

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, Literal

from nxdpp.counted import check_whole, counted
from nxdpp.planning.bounds import Bounds, LowerBounds
from nxdpp.planning.dtypes import name_of
from nxdpp.planning.layout import SHARDED, Layout, check_zero, describe, divisors, groups_of, schedules_of
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, TooLargeError, predict
from nxdpp.schedules.families.registry import find_family

_By = Literal["seconds", "bytes"]
_GIB = 2**30


@dataclass
class Found:
    """Result of a search.

    Attributes:
        best: predictions, the shortest step first.
        predicted: number of layouts that were predicted.
        too_large: number of layouts, or groups, that need more memory than a device has.
        refused: tensor-parallel sizes that the model refuses, with the reasons.
    """

    best: list[Prediction] = field(default_factory=list)
    predicted: int = 0
    too_large: int = 0
    refused: dict[int, str] = field(default_factory=dict)


def search(costs: ModelCosts, fixed: Mapping[str, Any] | None = None, best: int = 10) -> Found:
    """Return the ``best`` layouts of all that fit, one of each choice of sizes and switches.

    Args:
        costs: costs of the model, on its machine and for its job.
        fixed: values of fields of ``Layout`` that all layouts have. Without ``zero`` layouts of half parameters have at
            least ZeRO-1: the optimizer state is float32 in all layouts.
        best: number of predictions.

    Raises:
        ValueError: where no layout fits, with the smallest memory that one needs.
    """
    fixed = dict(fixed or {})
    known = {each.name for each in fields(Layout)}
    if unknown := sorted(set(fixed) - known):
        raise ValueError(f"fixed names {', '.join(unknown)}, but a layout has {', '.join(sorted(known))}.")
    if "schedule" in fixed:
        find_family(fixed["schedule"])
    check_whole("best", best)
    if "zero" in fixed:
        check_zero(fixed["zero"])
        _check_zeros(costs, [fixed["zero"]])
    if "experts" in fixed:
        costs.check_experts(fixed["experts"])
    found = Found()
    order = _Order(costs, fixed, found)
    for prediction in order.run("seconds", costs.machine.memory):
        found.best.append(prediction)
        if len(found.best) == best:
            break
    if not found.best:
        raise ValueError(_nothing_fits(costs, fixed, found))
    return found


def rank_layouts(costs: ModelCosts, layouts: Sequence[Layout], best: int = 10) -> Found:
    """Return the ``best`` of the given ``layouts``.

    Raises ``ValueError`` where none of them fits, and where their optimizers have different precisions.
    """
    check_whole("best", best)
    if not layouts:
        raise ValueError("layouts is empty: give at least one Layout, or leave it out to search.")
    if costs.has_half_parameters and len({layout.zero > 0 for layout in layouts}) > 1:
        raise ValueError(
            f"the optimizer state is float32 in layouts with zero=1 or more, and {name_of(costs.dtype)} in the others: "
            f"give zero to all layouts or to none."
        )
    _check_zeros(costs, [layout.zero for layout in layouts])
    found = Found(predicted=len(layouts))
    predictions = [predict(costs, layout) for layout in layouts]
    fitting = [each for each in predictions if each.peak_bytes <= costs.machine.memory]
    found.too_large = len(predictions) - len(fitting)
    if not fitting:
        least = min(predictions, key=lambda each: each.peak_bytes)
        raise ValueError(_needs(costs, least))
    found.best = sorted(fitting, key=lambda each: (each.step_seconds, each.layout))[:best]
    return found


def _check_zeros(costs: ModelCosts, zeros: Collection[int]) -> None:
    """Raise ``ValueError`` for stages of ZeRO that the job or the devices exclude."""
    if not _can_shard(costs) and max(zeros) >= SHARDED:
        raise ValueError(f"fully_shard is not for XLA devices: give zero=0 or 1, not {max(zeros)}.")
    if costs.itemsizes.to_gradient > 1 and 0 in zeros:
        raise ValueError(
            f"AdamW steps parameters in {name_of(costs.dtype)} by gradients of their dtype: leave gradient_dtype out "
            f"with zero=0, or give zero=1."
        )


def _can_shard(costs: ModelCosts) -> bool:
    return costs.machine.device.kind != "xla"


class _Order:
    """Layouts in the order of their predictions."""

    def __init__(self, costs: ModelCosts, fixed: Mapping[str, Any], found: Found) -> None:
        self._costs = costs
        self._fixed = fixed
        self._found = found
        self._bounds = LowerBounds(costs)
        self._taken: set[Layout] = set()
        # Tensor sizes, with the switch for sequence parallelism and the experts, that the model refuses.
        self._refused: set[tuple[int, bool, int]] = set()

    def run(self, by: _By, memory: float) -> Iterator[Prediction]:
        """Give predictions that fit into ``memory``, the best first."""
        numbers = count()
        heap: list[tuple[float, int, Layout, int, Prediction | None]] = []

        def push(bounds: Bounds, layout: Layout, level: int, prediction: Prediction | None = None) -> None:
            if bounds.bytes > memory:
                self._found.too_large += 1
                return
            heapq.heappush(heap, (getattr(bounds, by), next(numbers), layout, level, prediction))

        for group in self._groups():
            push(self._bounds.of_undivided(group), group, 0)
        while heap:
            _, _, layout, level, prediction = heapq.heappop(heap)
            if _choice(layout) in self._taken:
                continue
            if prediction is not None:
                self._taken.add(_choice(layout))
                yield prediction
            elif level == 0:
                if layout.tensor not in self._found.refused:
                    self._push_group(layout, push)
            elif level == 1:
                for each in self._layouts(layout):
                    push(self._bounds.of_layout(each), each, 2)
            else:
                self._found.predicted += 1
                try:
                    exact = predict(self._costs, layout, limit=memory)
                except TooLargeError:
                    self._found.too_large += 1
                    continue
                push(Bounds(exact.step_seconds, exact.peak_bytes), layout, 3, exact)

    def _push_group(self, group: Layout, push: Any) -> None:
        divided = group.tensor, group.sequence, group.experts
        if divided in self._refused:
            return
        try:
            push(self._bounds.of_group(group), group, 1)
        except ValueError as error:
            self._refused.add(divided)
            if not group.sequence and group.experts == 1:
                self._found.refused[group.tensor] = str(error)

    def _groups(self) -> Iterator[Layout]:
        machine, job = self._costs.machine, self._costs.job
        layers = len(self._costs.of(1, False, 1).layers)
        tensors = divisors(machine.devices_per_host)
        half = self._costs.has_half_parameters
        least = 1 if half and "zero" not in self._fixed else 0
        sizes = machine.devices, machine.devices_per_host, job.global_batch, layers, tensors, half
        for group in groups_of(*sizes, self._costs.expert_sizes):
            if group.zero < least or (group.is_sharded and not _can_shard(self._costs)):
                continue
            # ``_layouts`` chooses the fields of the schedule.
            chosen = {name: value for name, value in self._fixed.items() if name not in ("schedule", "chunks")}
            if all(getattr(group, name) == value for name, value in chosen.items()):
                yield group

    def _layouts(self, group: Layout) -> Iterator[Layout]:
        layers = len(self._costs.of(1, False, 1).layers)
        for schedule, chunks in schedules_of(group.pipeline, layers):
            if self._fixed.get("schedule", schedule) == schedule and self._fixed.get("chunks", chunks) == chunks:
                yield replace(group, schedule=schedule, chunks=chunks)


def _choice(layout: Layout) -> Layout:
    """Return the sizes and switches of ``layout``, without what follows from them: microbatch and schedule."""
    return replace(layout, chunks=1, schedule="", microbatch=1)


def _nothing_fits(costs: ModelCosts, fixed: Mapping[str, Any], found: Found) -> str:
    least = next(_Order(costs, fixed, Found()).run("bytes", float("inf")), None)
    if least is not None:
        return _needs(costs, least)
    machine, job = costs.machine, costs.job
    reasons = " ".join(f"Tensor-parallel size {size}: {reason}" for size, reason in sorted(found.refused.items()))
    given = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any sizes"
    return (
        f"no layout of {counted(machine.devices, 'device')} on {counted(machine.hosts, 'host')} with {given} fits the "
        f"model and a global batch of {job.global_batch}: each replica takes an equal number of samples, a tensor "
        "group stays on one host, a stage has at least one layer, ZeRO needs replicas, and sequence parallelism a "
        "tensor group. "
        f"{reasons}".strip()
    )


def _rounded_up(number: float) -> str:
    """Return ``number`` rounded up to four digits: a device with this much memory has to be enough."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 3)
    digits = max(-math.floor(math.log10(unit)), 0)
    return f"{math.ceil(number / unit) * unit:.{digits}f}"


def _needs(costs: ModelCosts, least: Prediction) -> str:
    machine = costs.machine
    return (
        f"no layout fits into {machine.memory / _GIB:.4g} GiB of a device: the smallest one needs "
        f"{_rounded_up(least.peak_bytes / _GIB)} GiB ({describe(least.layout)}). Use more devices, shorter sequences, "
        f"or devices with more memory."
    )
