"""``torch.autograd.Function`` in the spine: one node, so that its own backward is the one that runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.tracing.opaque import record_opaque_call


@contextmanager
def recorded_autograd_functions() -> Iterator[None]:
    """Record ``Function.apply`` given a traced value; fx would trace its ``forward``, and lose its ``backward``.

    One that is handed modules runs layers inside its backward (a reversible network): refused with ``RuntimeError``.
    """
    original: Any = torch.autograd.Function.__dict__["apply"]
    tracing_thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if threading.get_ident() != tracing_thread or not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return original.__get__(None, cls)(*args, **kwargs)
        if any(isinstance(leaf, nn.Module) for leaf in leaves):
            raise RuntimeError(
                f"{cls.__name__} is an autograd Function that runs the modules it is given, forward and backward, "
                f"itself; they cannot be cut"
            )
        return record_opaque_call(_Apply(cls), args, kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


class _Apply:
    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)
