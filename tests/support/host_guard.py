"""Guard of functional collectives: a tensor of another device than the CPU raises.

For XLA they are XLA's own collectives, whatever the group. nxdpp refuses the others by itself.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

_FUNCTIONAL = torch.ops._c10d_functional
_OPERATORS = [
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
]


def guard_functional() -> None:
    """Make functional collectives of this process raise ``RuntimeError`` for a tensor outside of host memory."""
    for name in _OPERATORS:
        if hasattr(_FUNCTIONAL, name):
            setattr(_FUNCTIONAL, name, _checked(getattr(_FUNCTIONAL, name)))


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def checked(*args: Any, **keywords: Any) -> Any:
        for tensor in _tensors([*args, *keywords.values()]):
            if tensor.device.type != "cpu":
                raise RuntimeError(f"a tensor of {tensor.device} reaches {call.__name__}")
        return call(*args, **keywords)

    return checked


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
