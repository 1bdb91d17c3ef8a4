"""Numbers of an optimizer's state, such as ``step``, as a JSON document has them exactly."""

from typing import Any

import torch

Scalar = dict[str, Any]
"""``{"number": 3.0}``, with ``"dtype": "float32"`` where the number was in a tensor without dimensions."""

_WORDS = ("nan", "inf", "-inf")


def is_scalar(value: Any) -> bool:
    """Return whether ``value`` is a number, ``None``, or a tensor without dimensions of a dtype that JSON can hold."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    return value is None or isinstance(value, bool | int | float)


def written_scalar(value: Any) -> Scalar:
    """Return the JSON form of a value for which ``is_scalar`` is true."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(number, float) and str(number) in _WORDS:
        number = str(number)
    if isinstance(value, torch.Tensor):
        return {"number": number, "dtype": str(value.dtype).removeprefix("torch.")}
    return {"number": number}


def read_scalar(saved: Scalar, device: torch.device) -> Any:
    """Return the value of a JSON form; a tensor is on ``device``."""
    number = saved["number"]
    if number in _WORDS:
        number = float(number)
    dtype = saved.get("dtype")
    return number if dtype is None else torch.tensor(number, dtype=dtype_named(dtype), device=device)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name without ``torch.``; raises ``ValueError`` for another name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch: the document is damaged.")
    return found
