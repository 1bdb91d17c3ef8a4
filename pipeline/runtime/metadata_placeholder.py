"""Tensors without data, for values of other stages of which only shape, dtype and device are used."""

from typing import Any

import torch

from nxdpp.pipeline.p2p.layout import TensorLayout, ValueLayout

_aten = torch.ops.aten
# Operations that make a new tensor from the metadata of another.
_LIKE = {
    _aten.empty_like.default,
    _aten.full_like.default,
    _aten.new_empty.default,
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
}


class MetadataPlaceholder(torch.Tensor):
    """Tensor without data in place of a value of another stage.

    A use of its data raises ``RuntimeError``: a wrong assumption about a use must not become a wrong number.
    """

    @staticmethod
    def __new__(cls, layout: TensorLayout, device: torch.device) -> "MetadataPlaceholder":
        """An empty tensor of the layout's size, strides and dtype."""
        return torch.Tensor._make_wrapper_subclass(
            cls, layout.size, strides=layout.strides, dtype=layout.dtype, device=device
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an option
        return f"MetadataPlaceholder(size={list(self.size())}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's names one argument otherwise
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make tensors from the placeholder's metadata; refuse all other operations."""
        if function in _LIKE and not any(isinstance(argument, MetadataPlaceholder) for argument in args[1:]):
            source = args[0]
            meta = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
            return function(meta, *args[1:], **{"device": source.device, **(kwargs or {})})
        raise RuntimeError(
            f"{function} asks for the data of a value that another stage computes; this stage has only its shape, "
            f"dtype and device. Make the module or function that does so a leaf together with its layer "
            f"(leaf_module_cls, autowrap_functions)."
        )


def metadata_placeholder(layout: ValueLayout, device: torch.device) -> Any:
    """A value of this layout whose tensors have no data."""
    return layout.build([MetadataPlaceholder(tensor, device) for tensor in layout.tensors])
