"""Dtype of gradients: that of their parameter, unless the program has chosen another (``grad_dtype``, torch 2.10)."""

import torch


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which gradients of ``parameter`` accumulate."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if chosen is None else chosen


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros in the place of a missing gradient of ``parameter``."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


def accumulate_in(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Have gradients of ``parameter`` accumulate in ``dtype``, if it has more bits than theirs.

    Raises:
        ValueError: where torch has no ``Tensor.grad_dtype``.
        RuntimeError: for a parameter that has a gradient.
    """
    if gradient_dtype(parameter).itemsize >= dtype.itemsize:
        return
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ValueError(
            f"gradients of {parameter.dtype} cannot accumulate in {dtype} with torch {torch.__version__}: take torch "
            f"2.10 or newer, or let them accumulate in {parameter.dtype} (use_fp32_grad_acc=False)."
        )
    if parameter.grad is not None:
        raise RuntimeError(
            f"a parameter of shape {list(parameter.shape)} has a gradient in {parameter.grad.dtype} already, and later "
            f"ones shall accumulate in {dtype}: make the optimizer before the first backward, or set .grad to None."
        )
    parameter.grad_dtype = dtype
