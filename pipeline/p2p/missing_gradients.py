"""Gradients that one process would not have, because the loss does not depend on the tensor (``detach``).

Their messages stay in the schedule. In host memory a message is a mark, with a bit pattern that no computation gives,
and the receiver sees it without waiting for a device. On a device the receiver looks only where the first microbatch of
the signature had no gradient. Elsewhere it gets zeros of a negative sign, which change no sum.
"""

import ctypes

import torch

# The gradient that a receive returns for a mark.
MISSING = torch.empty(0, device="cpu")

# By dtype: its first number as an integer, in C and in torch, and the bits of a not-a-number that no computation gives.
_MARKS = {
    dtype: (c_integer, integer, pattern)
    for c_integer, integer, pattern, dtypes in (
        (ctypes.c_int16, torch.int16, -0x1B, (torch.float16, torch.bfloat16, torch.complex32)),
        (ctypes.c_int32, torch.int32, -0x1A5A5B, (torch.float32, torch.complex64)),
        (ctypes.c_int64, torch.int64, -0x25A5A5A5A5A5B, (torch.float64, torch.complex128)),
    )
    for dtype in dtypes
}


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
    if mark.dtype not in _MARKS:
        raise TypeError(f"a gradient of {mark.dtype} between stages is missing, and this dtype has no mark for that.")
    _, integer, pattern = _MARKS[mark.dtype]
    memory = mark.as_strided((mark.numel(),), (1,))
    (torch.view_as_real(memory) if mark.is_complex() else memory).view(integer).fill_(pattern)
    return mark


def is_mark(received: torch.Tensor) -> bool:
    """Return whether the dense tensor ``received`` is a mark; this waits for the device of the tensor."""
    if received.dtype not in _MARKS or not received.numel():
        return False
    if received.device.type != "cpu":
        received = received.as_strided((1,), (1,)).cpu()
    # An operation of torch would take longer than the rest of a receive.
    c_integer, _, pattern = _MARKS[received.dtype]
    return c_integer.from_address(received.data_ptr()).value == pattern
