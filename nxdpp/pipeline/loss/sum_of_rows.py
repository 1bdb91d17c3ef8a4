"""A loss that is a sum over the rows of a microbatch: the mean of these losses is not the loss of the whole batch.

::

    whole batch        sum over 8 rows          = 24
    4 microbatches     mean of 6, 5, 7 and 6    =  6     1/4 of it, and so are the gradients

The autograd graph of a first loss shows it, wherever the loss is computed. It is read from the loss backwards, through
sums and factors, until a reduction is found: a mean, a division by a count, or a sum over rows. An unknown operation
is taken for right: ``check_against_module="first"`` compares the losses.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nxdpp.devices.kinds import device_of
from nxdpp.ground.torch_names import SAVED
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.microbatches.batch_dimension import rows_of
from nxdpp.pipeline.microbatches.mixed_rows import remedy_of_sum
from nxdpp.ranks import parallel_state
from nxdpp.tracing.graph.search import reached
from nxdpp.tracing.values.input_dicts import open_inputs

_logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"Backward\d*$")
_SUM = 2
_TOLERANCE = 1e-3
# Of a value of one element they keep, or add up, what it is a reduction of.
_ADDED = {"Add", "Sub", "Neg"}
_SAME_VALUES = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand", "Select", "ToCopy", "Alias"}
_SAME_VALUES |= {"Clone"}
# Before a sum they keep the rows apart.
_BY_ELEMENT = {*_ADDED, *_SAME_VALUES, "Mul", "Div", "Pow", "Abs", "Log", "Exp", "Sqrt", "T", "Transpose", "Permute"}
_BY_ELEMENT |= {"Stack", "Cat", "MaskedFill", "Where", "Clamp", "ClampMin", "Slice", "Sum"}
_BY_ELEMENT |= {"Index", "MaskedSelect"}
_CHOSEN = {"Index", "MaskedSelect"}
_PUT_TOGETHER = {"Stack", "Cat"}


@dataclass(frozen=True)
class FirstLoss(StepLoss):
    """The loss of a first step, whose graph is read.

    Attributes:
        rows: of the first microbatch; ``None`` where its inputs disagree.
        dimension: of the rows.
        told: what was told before, to which this loss adds.
    """

    rows: int | None = None
    dimension: int = 0
    told: set[str] = field(default_factory=set)

    def differentiated(self, microbatch: int, loss: Any) -> torch.Tensor | None:
        """Return the loss as ``StepLoss`` does, and warn of a sum over rows in that of microbatch 0."""
        is_read = (
            "sum" not in self.told and microbatch == 0 and isinstance(loss, torch.Tensor) and loss.grad_fn is not None
        )
        if is_read and _is_told():
            count = len(self.microbatches)
            found = next(sums_of_rows(loss, count, self.rows, self.dimension), None)
            if found is not None:
                self.told.add("sum")
                _logger.warning(
                    "the loss of a microbatch has a sum over its rows (%s), and a step takes the mean over its %d "
                    "microbatches: this part of the loss, and its gradients, are 1/%d of those of the whole batch in "
                    "one process. %s.",
                    found,
                    count,
                    count,
                    remedy_of_sum(count),
                )
        return super().differentiated(microbatch, loss)


def looked_at(step: StepLoss, config: PipelineConfig, told: set[str]) -> StepLoss:
    """Return the loss of a first step such that a sum over rows is found, once for a set ``told``."""
    count = len(step.microbatches)
    if type(step) is not StepLoss or count == 1 or step.is_sum or step.transform is not None:
        return step
    given, first = config.batch_dimension, open_inputs(step.microbatches[0])
    dimension = given if isinstance(given, int) else 0
    return FirstLoss(**vars(step), rows=rows_of(first, given, config.shared_inputs), dimension=dimension, told=told)


def sums_of_rows(loss: torch.Tensor, count: int, rows: int | None, dimension: int = 0) -> Iterator[str]:
    """Name the sums over ``rows``, along ``dimension``, that ``loss``, one of ``count``, consists of."""
    return _LossGraph(count, rows, dimension, loss.dtype).sums(loss.grad_fn)


def _is_told() -> bool:
    return not (parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_replica_rank())


@dataclass(frozen=True)
class _LossGraph:
    """The graph of a loss of ``dtype``, of one of ``count`` microbatches with ``rows``."""

    count: int
    rows: int | None
    dimension: int
    dtype: torch.dtype

    def sums(self, node: Any) -> Iterator[str]:
        for each in reached([node], self._terms):
            if _saved(each, "reduction") == _SUM:
                if not _is_of_parameters(each):
                    yield f"{_kind(each)} with reduction='sum'"
            elif _kind(each) == "Sum" and self._is_over_rows(each):
                yield f"sum() of {tuple(_saved(each, 'self_sym_sizes'))}"

    def _terms(self, node: Any) -> list[Any]:
        """The nodes of which ``node``, of one element, is a sum or a multiple."""
        kind = _kind(node)
        if kind == "Sum" and (stacked := _next(node)) and _kind(stacked[0]) in _PUT_TOGETHER:
            return _next(stacked[0])
        if kind == "Mul":
            return [] if self._is_mean_factor(node) else _next(node)
        return _next(node) if kind in _ADDED or kind in _SAME_VALUES else []

    def _is_over_rows(self, node: Any) -> bool:
        """Return whether the sum of ``node`` adds up values of all rows of a microbatch that nothing divides before."""
        sizes, before = _saved(node, "self_sym_sizes"), _by_element(node)
        if self.rows is None or not sizes or not before or _kind(before[0]) in _PUT_TOGETHER:
            return False
        along = sizes[self.dimension] if self.dimension < len(sizes) else sizes[0]
        # Rows and positions may be one dimension.
        is_flat = self.rows > 1 and len(sizes) < 3 and not sizes[0] % self.rows
        if along != self.rows and not is_flat and not _CHOSEN.intersection(map(_kind, before)):
            return False
        return not (_is_of_parameters(node) or any(map(self._divides, before)))

    def _divides(self, node: Any) -> bool:
        """Return whether ``node``, before a sum, is a mean over rows, or divides by a count or by weights of sum 1."""
        kind = _kind(node)
        if kind == "Mean":
            numbers, ndim = _saved(node, "dim"), len(_saved(node, "self_sym_sizes") or (1,))
            # Negative ones are kept as unsigned numbers of 64 bits.
            along = {int(each) if each < ndim else int(each) - (1 << 64) + ndim for each in numbers or ()}
            return not along or not along.isdisjoint((0, self.dimension))
        if kind not in ("Mul", "Div"):
            return False
        other = _constant(node)
        if other is None:
            return kind == "Div" and None not in _edges(node)
        if not isinstance(other, torch.Tensor) or other.numel() == 1:
            return self._is_mean_factor(node)
        is_read = kind == "Mul" and not other.is_meta and not device_of(other.device).is_lazy
        return is_read and abs(float(other.detach().double().sum()) - 1) < _TOLERANCE

    def _is_mean_factor(self, node: Any) -> bool:
        """Return whether the factor of ``node`` may make a mean of a sum, or is the number of microbatches."""
        value = _constant(node)
        if value is None or (isinstance(value, torch.Tensor) and (value.numel() > 1 or value.is_meta)):
            return True
        # Numbers of Python are of 64 bits; other tensors of one element are counts, or follow from them.
        if isinstance(value, torch.Tensor) and value.dtype not in (torch.float64, torch.int64):
            return True
        number = abs(float(value))
        if number in (0, self.count):
            return True
        inverse = number if _kind(node) == "Div" else 1 / number
        if inverse < max(2, (self.rows or 2) - 1) or abs(inverse - round(inverse)) > _TOLERANCE:
            return False
        is_count = isinstance(value, torch.Tensor) and value.dtype == self.dtype
        return is_count or _kind(node) == "Div" or self.rows is None or not round(inverse) % self.rows


def _by_element(node: Any) -> list[Any]:
    """The nodes before ``node`` up to those that mix elements."""
    return [*reached(_next(node), lambda each: _next(each) if _kind(each) in _BY_ELEMENT else ())]


def _is_of_parameters(node: Any) -> bool:
    """Return whether ``node`` reduces parameters only: a penalty."""
    leaves = [each for each in _by_element(node) if _kind(each) not in _BY_ELEMENT]
    return bool(leaves) and all(isinstance(getattr(each, "variable", None), nn.Parameter) for each in leaves)


def _constant(node: Any) -> Any:
    """The factor or divisor of ``node`` that has no gradient; ``None`` if both have one."""
    edges = _edges(node)
    if None not in edges and len(edges) > 1:
        return None
    return _saved(node, "self" if edges[0] is None else "other")


def _kind(node: Any) -> str:
    return _NUMBER.sub("", type(node).__name__)


def _edges(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions]


def _next(node: Any) -> list[Any]:
    return [following for following in _edges(node) if following is not None]


def _saved(node: Any, name: str) -> Any:
    """A value that ``node`` has saved; ``None`` where it has none."""
    try:
        return getattr(node, f"{SAVED.name}{name}", None)
    except RuntimeError:  # changed in place: the backward raises
        return None
