"""Guard of gloo: a tensor of another device than the CPU raises, before gloo returns it unchanged."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.distributed import ProcessGroup

_FUNCTIONAL = torch.ops._c10d_functional
# Methods of a group that take tensors. All calls of torch.distributed end in them, but for the functional operators.
_METHODS = [
    name
    for name in vars(ProcessGroup)
    if any(part in name for part in ("reduce", "gather", "scatter", "broadcast", "alltoall", "send", "recv"))
]
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


def guard_gloo() -> None:
    """Make each collective and send of this process raise ``RuntimeError`` for a tensor outside of host memory."""
    for name in _METHODS:
        setattr(ProcessGroup, name, _checked(getattr(ProcessGroup, name)))
    for name in _OPERATORS:
        if hasattr(_FUNCTIONAL, name):
            setattr(_FUNCTIONAL, name, _checked(getattr(_FUNCTIONAL, name)))


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def checked(*args: Any, **keywords: Any) -> Any:
        for tensor in _tensors([*args, *keywords.values()]):
            if tensor.device.type != "cpu":
                raise RuntimeError(f"a tensor of {tensor.device} reaches gloo in {call.__name__}")
        return call(*args, **keywords)

    return checked


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
