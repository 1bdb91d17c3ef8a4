"""Tensor constructors, recorded while tracing, also with traced sizes that torch could not take."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from nxdpp.tracing.calls import has_proxy
from nxdpp.tracing.checks import traced_is_tensor
from nxdpp.tracing.swap import swapped

_CONSTRUCTORS = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "linspace", "ones", "tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip
_RANDOM = ("bernoulli", "normal", "rand", "rand_like", "randint", "randn", "randn_like", "randperm")
_MODES = ("autocast", "enable_grad", "inference_mode", "no_grad", "set_grad_enabled")
_TYPE_LIMITS = ("finfo", "iinfo")


@contextmanager
def recorded_constructors(tracer: fx.Tracer) -> Iterator[None]:
    """Record every new tensor as a node, so that each stage that needs it makes it.

    Raises ``RuntimeError`` for random tensors outside the layers, which the trace would draw once, and for modes,
    which would apply to the trace only.
    """
    replacements = {name: _recorder(tracer, getattr(torch, name)) for name in _CONSTRUCTORS}
    replacements |= {name: _refusal(name) for name in _RANDOM}
    replacements |= {name: _limits_recorder(tracer, getattr(torch, name)) for name in _TYPE_LIMITS}
    replacements["is_tensor"] = traced_is_tensor
    with _in_torch(replacements), refused_modes():
        yield


@contextmanager
def refused_modes() -> Iterator[None]:
    """Refuse ``no_grad``, autocast and similar modes, which would apply to the trace only."""
    with _in_torch({name: _lost_mode(name) for name in _MODES}):
        yield


@contextmanager
def refused_random_tensors() -> Iterator[None]:
    """Refuse random tensors without a traced argument: a tracer that does not record them would draw them once."""
    with _in_torch({name: _refusal_unless_traced(name, getattr(torch, name)) for name in _RANDOM}):
        yield


def _in_torch(replacements: dict[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    return swapped(vars(torch), {n: _in_this_thread(new, getattr(torch, n)) for n, new in replacements.items()})


def _in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    # The thread of a data loader makes tensors at the same time.
    tracing_thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == tracing_thread
        return (replacement if here else original)(*args, **kwargs)

    return call


def _recorder(tracer: fx.Tracer, constructor: Callable[..., Any]) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_function", constructor, args, kwargs)

    return record


def _limits_recorder(tracer: fx.Tracer, limits: Any) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        if has_proxy(args, kwargs):
            return tracer.create_proxy("call_function", limits, args, kwargs)
        return limits(*args, **kwargs)

    return record


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch.{name} is called outside the transformer layers; traced, it would be drawn once and for all"
        )

    return refuse


def _refusal_unless_traced(name: str, constructor: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        return (constructor if has_proxy(args, kwargs) else _refusal(name))(*args, **kwargs)

    return refuse


def _lost_mode(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch.{name} is used outside the transformer layers; traced, it would have no effect")

    return refuse
