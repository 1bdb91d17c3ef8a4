"""Gradients that one process would not have, because the loss does not depend on the tensor (``detach``).

The destination stage tells them with the first gradient of a signature. Their messages stay in the schedule, with zeros
of a negative sign: these change no sum, and an ordinary gradient is not made of them alone.
"""

import torch


def mark_like(tensor: torch.Tensor) -> torch.Tensor:
    """The message for a missing gradient of ``tensor``: -0.0 in its shape, dtype and strides."""
    return torch.zeros_like(tensor, requires_grad=False).neg_()


def is_mark(received: torch.Tensor) -> bool:
    """Return whether each element of ``received`` is -0.0; this waits for the device."""
    values = torch.view_as_real(received) if received.is_complex() else received
    return not values.any() and bool(values.signbit().all())
