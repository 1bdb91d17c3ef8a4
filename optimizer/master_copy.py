"""Master copies: values in float32 beside parameters in half precision."""

import torch


def master_dtype(dtype: torch.dtype, wanted: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype in which an optimizer keeps values of ``dtype``: ``wanted``, or at least float32."""
    if wanted is not None:
        return wanted
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def take_changes(master: torch.Tensor, values: torch.Tensor) -> None:
    """Take over those ``values`` of a parameter that are not the rounded ``master``: a program has loaded them.

    Both have the same shape; ``values`` has the lower precision. Other elements keep their low bits.
    """
    changed = master.to(values.dtype) != values
    master.copy_(torch.where(changed, values.to(master.dtype), master))
