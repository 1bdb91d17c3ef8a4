"""Gradients that one process would not have, because the loss does not depend on the tensor (``detach``).

Their messages stay in the schedule. In host memory a message is a mark, with a bit pattern that no computation gives,
and the receiver sees it without waiting for a device. On a device the receiver looks only where the first microbatch of
the signature had no gradient. Elsewhere it gets zeros of a negative sign, which change no sum.
"""

import ctypes

import torch

# The gradient that a receive returns for a mark.
MISSING = torch.empty(0, device="cpu")

# A not-a-number of each floating dtype of this size; those of computations have other bits.
_PATTERNS = {2: -0x1B, 4: -0x1A5A5B, 8: -0x25A5A5A5A5A5B}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_C_INTEGERS = {2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """-0.0 in the shape and strides of ``tensor``, in its dtype by default: neutral in each sum."""
    return torch.zeros_like(tensor, dtype=dtype, requires_grad=False).neg_()


def are_zeros(received: torch.Tensor) -> bool:
    """Return whether each element of ``received`` is -0.0; this waits for the device."""
    values = torch.view_as_real(received) if received.is_complex() else received
    return not values.any() and bool(values.signbit().all())


def mark_like(tensor: torch.Tensor) -> torch.Tensor:
    """The message for a missing gradient of a dense ``tensor``, in its shape, dtype and strides.

    Raises ``TypeError`` for a dtype of one byte.
    """
    mark = torch.empty_like(tensor, requires_grad=False)
    size = _size(mark)
    if size not in _PATTERNS:
        raise TypeError(f"a gradient of {mark.dtype} between stages is missing, and this dtype has no mark for that.")
    memory = mark.as_strided((mark.numel(),), (1,))
    (torch.view_as_real(memory) if mark.is_complex() else memory).view(_INTEGERS[size]).fill_(_PATTERNS[size])
    return mark


def is_mark(received: torch.Tensor) -> bool:
    """Return whether the dense tensor ``received`` is a mark; this waits for the device of the tensor."""
    size = _size(received)
    if size not in _PATTERNS or not received.numel():
        return False
    if received.device.type != "cpu":
        received = received.as_strided((1,), (1,)).cpu()
    # An operation of torch would take longer than the rest of a receive.
    return _C_INTEGERS[size].from_address(received.data_ptr()).value == _PATTERNS[size]


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a real number of ``tensor``."""
    return tensor.element_size() // (2 if tensor.is_complex() else 1)
