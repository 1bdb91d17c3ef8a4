"""What is known of a value that crosses stages before it arrives: enough to allocate it and to put it together."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TensorLayout:
    """A tensor's metadata; strides are those of dense memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

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
class ValueLayout:
    """The layout of a value: the value itself, with a ``TensorLayout`` in the place of each tensor."""

    skeleton: Any

    @property
    def tensors(self) -> list[TensorLayout]:
        """Layouts of the tensors, in the order in which they travel."""
        return [leaf for leaf in pytree.tree_leaves(self.skeleton) if isinstance(leaf, TensorLayout)]

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """The value with ``tensors`` in their places."""
        if isinstance(self.skeleton, TensorLayout):
            return tensors[0]
        remaining = iter(tensors)
        return pytree.tree_map(lambda leaf: next(remaining) if isinstance(leaf, TensorLayout) else leaf, self.skeleton)


def layout_of(value: Any) -> ValueLayout:
    """Describe ``value``."""
    return ValueLayout(
        pytree.tree_map(lambda leaf: _tensor_layout(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of ``value``, in the order in which they travel."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def check_layout(name: str, value: Any, layout: ValueLayout) -> None:
    """Raise ``RuntimeError`` where ``value`` is not what was agreed for these inputs."""
    tensors = tensors_of(value)
    expected = layout.tensors
    same_tensors = len(tensors) == len(expected) and all(map(TensorLayout.describes, expected, tensors))
    if not same_tensors or (not isinstance(value, torch.Tensor) and _constants(value) != _constants(layout.skeleton)):
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


def _tensor_layout(tensor: torch.Tensor) -> TensorLayout:
    # A tensor on the meta device costs nothing; its strides are the dense ones nearest to the tensor's own.
    dense = torch.empty_like(tensor, device="meta")
    return TensorLayout(tensor.size(), dense.stride(), tensor.dtype, tensor.requires_grad)


def _show(layout: ValueLayout) -> str:
    shown = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.size)}" for leaf in layout.tensors]
    return ", ".join([*shown, *map(repr, _constants(layout.skeleton))])


def _constants(value: Any) -> list[Any]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | TensorLayout)]
