"""Boundary between two stages: the values that cross it, and the layout of each of their tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nxdpp.pipeline.p2p.layout import TensorLayout, ValueLayout, tensors_of


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
