"""CPU memory for meta tensors, filled with a mark by which unwritten elements are found later."""

from typing import Any

import torch
from torch import nn

from nxdpp.ground.torch_names import TorchDispatchMode
from nxdpp.ground.transformers_names import IS_INITIALIZED

aten = torch.ops.aten

# Repeated, the byte gives -1.7e38, or a NaN that no conversion yields; 0xFF is the only NaN of some 8-bit types.
_UNWRITTEN, _UNWRITTEN_SINGLE = 0xFE, 0xFF
_PIECE_BYTES = 2**22
_MAKE_UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def allocate(meta: torch.Tensor) -> torch.Tensor:
    """Return an unwritten CPU tensor of the same shape, strides, dtype, class, ``requires_grad`` and attributes."""
    real = torch.empty_like(meta, device="cpu", requires_grad=False)
    mark(real)
    return with_type_of(real, meta)


def mark(tensor: torch.Tensor) -> None:
    """Mark all memory of ``tensor`` as unwritten."""
    _bytes(tensor).fill_(_mark(tensor))


class MarkedMemory(TorchDispatchMode):
    """Dispatch mode that marks new memory (``torch.empty``, ``Module.to_empty``) as unwritten."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _MAKE_UNWRITTEN and not result.is_meta:
            mark(result)
        return result


def with_type_of(real: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Return ``real`` with the parameter class and the attributes of ``meta``."""
    if isinstance(meta, nn.Parameter):
        # Not the class itself, whose __new__ may take other arguments.
        real = nn.Parameter.__new__(type(meta), real.detach(), meta.requires_grad)
    vars(real).update({key: value for key, value in vars(meta).items() if key != IS_INITIALIZED.name})
    return real


def replacement(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return ``new`` with the class of ``old`` and its missing attributes; it is frozen if one of them is frozen."""
    result = with_type_of(new, old)
    vars(result).update(vars(new))
    return result.requires_grad_(new.requires_grad and old.requires_grad)


def count_unwritten(tensor: torch.Tensor) -> int:
    """Number of elements not written since ``allocate``; 0 for integers, whose values may be any bits."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    # A comparison of integers is much faster than one of bytes. Elements of 16 bytes are pairs of integers.
    size = min(tensor.element_size(), 8)
    marked = int.from_bytes(bytes([_mark(tensor)]) * size, "little", signed=True)
    integers = _bytes(tensor.detach()).view(_INTEGERS[size])
    if tensor.element_size() == 2 * size:
        integers = integers.view(-1, 2)
    pieces = integers.split(_PIECE_BYTES // tensor.element_size())
    return sum(int(torch.count_nonzero(_equal(piece, marked))) for piece in pieces)


def _equal(integers: torch.Tensor, marked: int) -> torch.Tensor:
    equal = integers == marked
    return equal if equal.ndim == 1 else equal.all(dim=1)


def _mark(tensor: torch.Tensor) -> int:
    return _UNWRITTEN_SINGLE if tensor.element_size() == 1 else _UNWRITTEN


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    flat: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    # Without this overload in torch's stubs.
    of_storage: torch.Tensor = flat.set_(storage, 0, (storage.nbytes(),))
    return of_storage
