"""Memory for tensors of the meta device, marked so that what nobody has written is found again."""

import torch
from torch import nn

# Repeated, -1.7e38 or a NaN that no conversion yields; in one byte the only NaN of some types.
_UNWRITTEN, _UNWRITTEN_SINGLE = 0xFE, 0xFF
_CHUNK_BYTES = 2**22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def allocate(meta: torch.Tensor) -> torch.Tensor:
    """An unwritten CPU tensor of the same shape, strides, dtype, class, ``requires_grad`` and own attributes.

    A parameter stays one, of its class.
    """
    real = torch.empty_like(meta, device="cpu", requires_grad=False)
    mark(real)
    return dress(real, meta)


def mark(tensor: torch.Tensor) -> None:
    """Make all of ``tensor``'s memory unwritten."""
    _bytes(tensor).fill_(_mark(tensor))


def dress(real: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """``real`` as what ``meta`` is: a parameter of its class or a plain tensor, with its attributes."""
    if isinstance(meta, nn.Parameter):
        real = torch.Tensor._make_subclass(type(meta), real.detach(), meta.requires_grad)
    vars(real).update({key: value for key, value in vars(meta).items() if key != "_is_hf_initialized"})
    return real


def take_the_place_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new`` with the class and the attributes of ``old`` that it lacks, and frozen where either is."""
    dressed = dress(new, old)
    vars(dressed).update(vars(new))
    return dressed.requires_grad_(new.requires_grad and old.requires_grad)


def count_unwritten(tensor: torch.Tensor) -> int:
    """How many elements nobody has written since ``allocate``.

    Of floating-point tensors alone: in others any bits may be meant.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    # Compared as integers, many times faster than as bytes; the only larger elements are pairs of 8 bytes.
    size = min(tensor.element_size(), 8)
    marked = int.from_bytes(bytes([_mark(tensor)]) * size, "little", signed=True)
    integers = _bytes(tensor.detach()).view(_INTEGERS[size])
    if tensor.element_size() == 2 * size:
        integers = integers.view(-1, 2)
    chunks = integers.split(_CHUNK_BYTES // tensor.element_size())
    return sum(int(torch.count_nonzero(_equal(chunk, marked))) for chunk in chunks)


def _equal(integers: torch.Tensor, marked: int) -> torch.Tensor:
    equal = integers == marked
    return equal if equal.ndim == 1 else equal.all(dim=1)


def _mark(tensor: torch.Tensor) -> int:
    return _UNWRITTEN_SINGLE if tensor.element_size() == 1 else _UNWRITTEN


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload, no-any-return]
