"""Dtype and layout of gradients: dense, in the dtype of the parameter unless ``grad_dtype`` (torch 2.10) is set.

Optimizers keep master copies, values in float32 next to parameters in half precision.
"""

import torch


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which gradients of ``parameter`` accumulate."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if chosen is None else chosen


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros in place of a missing gradient of ``parameter``."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


def dense(gradient: torch.Tensor, parameter: torch.Tensor, use: str = "averaged in buckets") -> torch.Tensor:
    """Return ``gradient`` of ``parameter``. Raises ``ValueError`` for a sparse one, which cannot be of ``use``."""
    if gradient.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be {use}: build its "
            f"embedding with sparse=False"
        )
    return gradient


def accumulate_in(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Have gradients of ``parameter`` accumulate in ``dtype``, if it has more bits than theirs.

    Raises ``ValueError`` where torch has no ``Tensor.grad_dtype``, ``RuntimeError`` for a parameter that has a
    gradient.
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


def master_dtype(dtype: torch.dtype, wanted: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype in which an optimizer keeps values of ``dtype``: ``wanted``, or at least float32."""
    if wanted is not None:
        return wanted
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def take_changes(master: torch.Tensor, values: torch.Tensor) -> None:
    """Take over the ``values`` that are not the rounded ``master``: a program has changed them.

    Both have the same shape; ``values`` has the lower precision. Other elements keep their low bits.
    """
    changed = master.to(values.dtype) != values
    master.copy_(torch.where(changed, values.to(master.dtype), master))
