"""Tensors that are neither parameters nor buffers, as the spine keeps them: in a dict, or in plain attributes.

``self.tokens.expand(batch_size, -1)`` of such a tensor needs a number where the trace has a value. The call becomes a
node that holds the tensor. fx itself handles a single traced tensor, and functions with one among their arguments.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from nxdpp.tracing.graph.calls import has_proxy, record_opaque_call
from nxdpp.tracing.graph.swap import in_this_thread

_WITH_SIZES = (
    "expand", "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "repeat", "reshape", "tile", "view",
)  # fmt: skip


class _Method:
    """A method of a tensor, called with the tensor first."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, self.__name__)(*args, **kwargs)


def recorded_sizes() -> AbstractContextManager[Any]:
    """Record methods of tensors that take sizes, where a size is a traced value."""
    return patch.multiple(torch.Tensor, **{n: _recorded(n, getattr(torch.Tensor, n)) for n in _WITH_SIZES})


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_proxy(args, kwargs):
            return record_opaque_call(_Method(name), (tensor, *args), kwargs)
        return method(tensor, *args, **kwargs)

    return in_this_thread(call, method)
