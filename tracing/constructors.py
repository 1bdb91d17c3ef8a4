"""Tensor constructors that are recorded while tracing, also where torch could not take a traced size."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.utils import _pytree as pytree

_CONSTRUCTORS = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "linspace", "ones", "tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip
_RANDOM = ("bernoulli", "normal", "rand", "rand_like", "randint", "randn", "randn_like", "randperm")
_TYPE_LIMITS = ("finfo", "iinfo")


@contextmanager
def recorded_constructors(tracer: fx.Tracer) -> Iterator[None]:
    """Record every tensor made while tracing as a node, so that it is made anew wherever it is needed.

    A random number drawn outside the layers would be drawn once, at tracing: that is refused.
    """
    with ExitStack() as stack:
        for name in _CONSTRUCTORS:
            stack.enter_context(patch.object(torch, name, _recorder(tracer, getattr(torch, name))))
        for name in _RANDOM:
            stack.enter_context(patch.object(torch, name, _refusal(name)))
        for name in _TYPE_LIMITS:
            stack.enter_context(patch.object(torch, name, _limits_recorder(tracer, getattr(torch, name))))
        yield


def _recorder(tracer: fx.Tracer, constructor: Callable[..., Any]) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_function", constructor, args, kwargs)

    return record


def _limits_recorder(tracer: fx.Tracer, limits: Any) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
            return tracer.create_proxy("call_function", limits, args, kwargs)
        return limits(*args, **kwargs)

    return record


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch.{name} is called outside the transformer layers; traced, it would be drawn once and for all"
        )

    return refuse
