"""What is known of a value that crosses stages before it arrives: enough to allocate it and to put it together."""

import io
import pickle
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nxdpp.tracing.containers import Leaf, leaves_of, map_leaves


@dataclass(frozen=True)
class TensorLayout(Leaf):
    """A tensor's metadata; strides are those of dense memory.

    ``shares_memory`` tells that another tensor that crosses, a view say, has the same memory at its maker.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    shares_memory: bool = False

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Uninitialised memory for the tensor."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has this size and dtype (its strides may differ: it is copied into place then)."""
        return tensor.size() == self.size and tensor.dtype == self.dtype

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with this layout's strides: itself, or a copy."""
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True)
class Again(Leaf):
    """A tensor that stands in the same value already, as its ``position``-th tensor."""

    position: int


@dataclass(frozen=True)
class ValueLayout:
    """The layout of a value: the value itself, with a ``TensorLayout`` in the place of each tensor.

    One tensor that stands in a value twice travels once, and stands there twice again.
    """

    skeleton: Any

    @cached_property
    def tensors(self) -> list[TensorLayout]:
        """Layouts of the tensors, in the order in which they travel."""
        return [leaf for leaf in leaves_of(self.skeleton) if isinstance(leaf, TensorLayout)]

    @cached_property
    def shares_memory(self) -> bool:
        """Whether a tensor of it has memory in common with another that crosses."""
        return any(tensor.shares_memory for tensor in self.tensors)

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """The value with ``tensors`` in their places."""
        if isinstance(self.skeleton, TensorLayout):
            return tensors[0]
        remaining = iter(tensors)

        def put(leaf: Any) -> Any:
            if isinstance(leaf, Again):
                return tensors[leaf.position]
            return next(remaining) if isinstance(leaf, TensorLayout) else leaf

        return map_leaves(put, self.skeleton)


def layout_of(value: Any, shared: Collection[int] = ()) -> ValueLayout:
    """Describe ``value``: a nest of tuples, lists, dicts and dataclasses.

    ``shared`` are the addresses of memory that other values have, too (``shared_memory``). Raises ``TypeError``
    for another object with tensors in it, which would travel only once.
    """
    positions: dict[int, int] = {}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            _refuse_hidden_tensors(leaf)
            return leaf
        if id(leaf) in positions:
            return Again(positions[id(leaf)])
        positions[id(leaf)] = len(positions)
        return _tensor_layout(leaf, shared)

    return ValueLayout(map_leaves(describe, value))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of ``value``, each once, in the order in which they travel."""
    if isinstance(value, torch.Tensor):
        return [value]
    return list({id(leaf): leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)}.values())


def check_layout(name: str, value: Any, layout: ValueLayout) -> None:
    """Raise ``RuntimeError`` where ``value`` is not what was agreed for these inputs."""
    lone = layout.skeleton
    is_lone = isinstance(value, torch.Tensor) and isinstance(lone, TensorLayout) and lone.describes(value)
    if is_lone and value.requires_grad <= lone.requires_grad:
        return
    tensors = tensors_of(value)
    expected = layout.tensors
    same_tensors = len(tensors) == len(expected) and all(map(TensorLayout.describes, expected, tensors))
    if not same_tensors or not _same_constants(value, layout):
        raise RuntimeError(
            f"the value {name} that crosses stages is now {_show(layout_of(value))}; for inputs of the same shapes "
            f"it was {_show(layout)}. A size or a number that depends on the data cannot cross a cut: cut "
            f"elsewhere, or make the modules between one layer."
        )
    if any(t.requires_grad and not e.requires_grad for t, e in zip(tensors, expected, strict=True)):
        raise RuntimeError(
            f"the value {name} that crosses stages now requires a gradient and did not before: parameters were "
            f"unfrozen since. Call refresh() on every rank after changing requires_grad."
        )


def shared_memory(values: Iterable[Any]) -> set[int]:
    """Addresses of memory that several of the tensors in ``values`` have."""
    found = Counter(tensor.untyped_storage().data_ptr() for value in values for tensor in tensors_of(value))
    return {address for address, count in found.items() if count > 1 and address}


def _tensor_layout(tensor: torch.Tensor, shared: Collection[int]) -> TensorLayout:
    # A tensor on the meta device costs nothing; its strides are the dense ones nearest to the tensor's own.
    dense = torch.empty_like(tensor, device="meta")
    shares = bool(shared) and tensor.untyped_storage().data_ptr() in shared
    return TensorLayout(tensor.size(), dense.stride(), tensor.dtype, tensor.requires_grad, shares)


def _show(layout: ValueLayout) -> str:
    shown = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.size)}" for leaf in layout.tensors]
    return ", ".join([*shown, *map(repr, _constants(layout.skeleton))])


def _same_constants(value: Any, layout: ValueLayout) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(layout.skeleton, TensorLayout):
        return True
    return _constants(layout_of(value).skeleton) == _constants(layout.skeleton)


def _constants(value: Any) -> list[Any]:
    return [leaf for leaf in leaves_of(value) if not isinstance(leaf, torch.Tensor | TensorLayout)]


class _TensorFinder(pickle.Pickler):
    def persistent_id(self, value: Any) -> None:
        """Raise ``TypeError`` at the first tensor."""
        if isinstance(value, torch.Tensor):
            raise TypeError("a tensor")


def _refuse_hidden_tensors(leaf: Any) -> None:
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return
    try:
        _TensorFinder(io.BytesIO()).dump(leaf)
    except Exception as error:
        raise TypeError(
            f"a {type(leaf).__name__} with {error} in it crosses stages. Tensors, numbers, strings, and tuples, lists, "
            f"dicts and dataclasses of them can: make it one of those, or cut elsewhere."
        ) from error
