"""Boundary between two stages, and layouts of its values: enough to allocate tensors and to build values of them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from nxdpp.devices.kinds import memory_of
from nxdpp.devices.strides import with_strides
from nxdpp.ranks.wire_form import packed
from nxdpp.tracing.values.nested import Leaf, leaves_of, map_leaves


@dataclass(frozen=True)
class TensorLayout(Leaf):
    """Shape, strides and dtype of a tensor.

    ``stride`` are the strides of the dense memory that is sent. ``own_stride`` are the tensor's own, if not dense.
    ``shares_memory``: on the source stage another sent tensor, for example a view, has the same memory.
    ``is_cpu``: in host memory on the source stage, and so on the destination, whatever the wire's device is.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    shares_memory: bool = False
    own_stride: tuple[int, ...] | None = None
    is_cpu: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the tensor itself."""
        return self.stride if self.own_stride is None else self.own_stride

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Uninitialised memory for the tensor."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def describes(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has this size and dtype; with other strides ``arrange`` copies it."""
        return tensor.size() == self.size and tensor.dtype == self.dtype

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` with the strides of dense memory: itself, or a copy."""
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)

    def restore(self, received: torch.Tensor) -> torch.Tensor:
        """Return what was arranged, with its own strides, from the dense memory of ``received``."""
        received = received.cpu() if self.is_cpu else received
        if received.stride() != self.stride:
            received = received.as_strided(self.size, self.stride)
        return received if self.own_stride is None else with_strides(received, self.own_stride)


@dataclass(frozen=True)
class Repeated(Leaf):
    """A second place of the value's ``position``-th tensor."""

    position: int


@dataclass(frozen=True)
class ValueLayout:
    """The layout of a value: the value itself, with a ``TensorLayout`` in place of each tensor.

    A tensor with two places in the value is sent once, and gets both places again.
    """

    skeleton: Any

    @cached_property
    def tensors(self) -> list[TensorLayout]:
        """Layouts of the tensors, in the order in which they are sent."""
        return [leaf for leaf in leaves_of(self.skeleton) if isinstance(leaf, TensorLayout)]

    @cached_property
    def shares_memory(self) -> bool:
        """True if a tensor of the value shares memory with another sent tensor."""
        return any(tensor.shares_memory for tensor in self.tensors)

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """Return the value with ``tensors`` in their places."""
        if isinstance(self.skeleton, TensorLayout):
            return tensors[0]
        remaining = iter(tensors)

        def put(leaf: Any) -> Any:
            if isinstance(leaf, Repeated):
                return tensors[leaf.position]
            return next(remaining) if isinstance(leaf, TensorLayout) else leaf

        return map_leaves(put, self.skeleton)


def layout_of(value: Any, shared: Collection[int] = ()) -> ValueLayout:
    """The layout of ``value``: nested tuples, lists, dicts and dataclasses.

    ``shared`` are the addresses that ``shared_memory`` returns. Raises ``TypeError`` for any other object that
    holds tensors: it would be sent in the first step only. Also for a sparse tensor.
    """
    positions: dict[int, int] = {}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            _refuse_hidden_tensors(leaf)
            return leaf
        if leaf.layout != torch.strided:
            raise TypeError(
                f"a tensor of {leaf.layout} cannot be sent to another stage. Return it dense (.to_dense()) from the "
                f"layer before the cut, and convert it in the layer after the cut (.to_sparse()), or cut elsewhere."
            )
        if id(leaf) in positions:
            return Repeated(positions[id(leaf)])
        positions[id(leaf)] = len(positions)
        return tensor_layout(leaf, shared)

    return ValueLayout(map_leaves(describe, value))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of ``value``, each once, in the order in which they are sent."""
    if isinstance(value, torch.Tensor):
        return [value]
    return list({id(leaf): leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)}.values())


def check_layout(name: str, value: Any, layout: ValueLayout) -> None:
    """Raise ``RuntimeError`` when ``value`` does not have the layout of the first microbatch of this signature."""
    # One tensor, the usual value: without a further call.
    lone = layout.skeleton
    if isinstance(value, torch.Tensor) and isinstance(lone, TensorLayout):
        is_same = value.size() == lone.size and value.dtype == lone.dtype
        if is_same and value.requires_grad <= lone.requires_grad:
            return
    tensors = tensors_of(value)
    expected = layout.tensors
    same_tensors = len(tensors) == len(expected) and all(map(TensorLayout.describes, expected, tensors))
    if not same_tensors or not _same_constants(value, layout):
        raise RuntimeError(
            f"the value {name}, which one stage sends to another, is now {_show(layout_of(value))}; for inputs of the "
            f"same shapes it was {_show(layout)}. A size or a number that depends on the data cannot be sent: cut "
            f"elsewhere, or make the modules between one layer."
        )
    if any(t.requires_grad and not e.requires_grad for t, e in zip(tensors, expected, strict=True)):
        raise RuntimeError(
            f"the value {name}, which one stage sends to another, now requires a gradient and did not before: "
            f"parameters were unfrozen since. Call refresh() on every rank after changing requires_grad."
        )


def shared_memory(values: Iterable[Any]) -> set[int]:
    """Addresses of memory that several of the tensors in ``values`` share."""
    dense = (each for value in values for each in tensors_of(value) if each.layout == torch.strided)
    found = Counter(map(memory_of, dense))
    return {address for address, count in found.items() if count > 1 and address}


def tensor_layout(tensor: torch.Tensor, shared: Collection[int] = ()) -> TensorLayout:
    """The layout of one tensor; ``shared`` as for ``layout_of``."""
    # A tensor on the meta device has no memory; its strides are the dense ones nearest to the tensor's own.
    dense = torch.empty_like(tensor, device="meta").stride()
    shares = bool(shared) and memory_of(tensor) in shared
    own = None if dense == tensor.stride() else tensor.stride()
    return TensorLayout(tensor.size(), dense, tensor.dtype, tensor.requires_grad, shares, own, tensor.is_cpu)


def _show(layout: ValueLayout) -> str:
    shown = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.size)}" for leaf in layout.tensors]
    return ", ".join([*shown, *map(repr, _constants(layout.skeleton))])


def _same_constants(value: Any, layout: ValueLayout) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(layout.skeleton, TensorLayout):
        return True
    return _constants(layout_of(value).skeleton) == _constants(layout.skeleton)


def _constants(value: Any) -> list[Any]:
    return [leaf for leaf in leaves_of(value) if not isinstance(leaf, torch.Tensor | TensorLayout)]


def _refuse_hidden_tensors(leaf: Any) -> None:
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return
    try:
        packed(leaf, with_tensors=False)
    except TypeError as error:
        raise TypeError(
            f"a {type(leaf).__name__} cannot be sent to another stage: {error}. Tensors, numbers, strings, and tuples, "
            f"lists, dicts and dataclasses of them can: make it one of those, or cut elsewhere."
        ) from error


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor that crosses a boundary: the ``position``-th of a value, or the gradient of it.

    ``number`` is unique within the boundary, and equal on both of its ranks. ``is_none`` is ``True`` for a gradient
    that the first microbatch did not have: its loss does not depend on the tensor.
    """

    value: str
    position: int
    number: int
    layout: TensorLayout
    is_none: bool = False


class Boundary:
    """The values of stage ``source`` that stage ``destination`` receives, by name.

    Activations go from ``source`` to ``destination``, gradients back. The layouts are known after the metadata
    exchange, in the first step of a signature; until then ``layouts`` is empty. A gradient has the layout of its tensor
    until the destination stage has found the gradient's own (``knows_gradients``). Both take the same memory.

    Args:
        source: number of the stage that computes the values.
        destination: number of the later stage that uses them.
        values: the values whose tensors are sent.
        metadata_only: the values of which ``destination`` needs only shapes and dtypes.
    """

    def __init__(self, source: int, destination: int, values: Sequence[str], metadata_only: Sequence[str]) -> None:
        self.source = source
        self.destination = destination
        # Both ranks must number alike, and the plan of each stage lists values in its own order.
        self.values = sorted(values)
        self.metadata_only = sorted(metadata_only)
        self.layouts: Mapping[str, ValueLayout] = {}
        self.activations: list[BoundaryTensor] = []
        self.gradients: list[BoundaryTensor] = []
        self.knows_gradients = False

    def set_layouts(self, layouts: Mapping[str, ValueLayout]) -> None:
        """Number the tensors of the values, whose layouts the source stage has found."""
        self.layouts = layouts
        for name in self.values:
            for position, layout in enumerate(layouts[name].tensors):
                self.activations.append(BoundaryTensor(name, position, len(self.activations), layout))
        self.gradients = [entry for entry in self.activations if entry.layout.requires_grad]

    def set_gradient_layouts(self, layouts: Sequence[TensorLayout | None]) -> None:
        """Take over the layouts of the gradients, ``None`` for gradients that the destination stage did not find."""
        self.gradients = [
            replace(entry, is_none=True) if layout is None else replace(entry, layout=layout)
            for entry, layout in zip(self.gradients, layouts, strict=True)
        ]
        self.knows_gradients = True

    def activations_in(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors (B, T, H) that cross the boundary, out of the autograd graph, in the order of sends."""
        tensors = []
        for entry in self.activations:
            value = values[entry.value]
            tensor = value if isinstance(value, torch.Tensor) else tensors_of(value)[entry.position]
            tensors.append(tensor.detach())
        return tensors
