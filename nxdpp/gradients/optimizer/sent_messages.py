"""Errors for a step that sends messages itself, over a part of a model.

An optimizer that shares its work over ranks, or averages over them, takes the lists of all ranks for equal. Those of
stages hold other layers, which it would mix. Steps of declared classes end before the first message::

    first step      a mode of torch sees each operation, those of DTensors too
    later steps     the methods of process groups raise meanwhile, which takes 3 µs a step

A closure may send: it runs outside of both.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.ground.torch_names import TorchDispatchMode

_HOOKED = Optimizer.profile_hook_step(lambda optimizer: None).__code__
_SENDING = ("all", "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier", "monitored")

# By optimizer whose steps are watched: whether the next one is the first.
_watched = WeakIdKeyDictionary()
# The class whose step a thread is in.
_stepping: dict[int, str] = {}


def watch_steps(optimizer: Optimizer) -> None:
    """Let steps of ``optimizer``, of a class of ``refuse_messages``, raise ``RuntimeError`` where they send."""
    _watched[optimizer] = True


def refuse_messages(optimizer_class: Any) -> None:
    """Let optimizers of this class be watched, those that are there too."""
    step = without_hooks(optimizer_class.step)

    @functools.wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer not in _watched:
            return step(optimizer, *args, **kwargs)
        kind = type(optimizer).__name__
        refusing: AbstractContextManager[Any] = _NoMessages(kind) if _watched[optimizer] else _NoCalls(kind)
        _watched[optimizer] = False
        with refusing:
            outside = functools.partial(_outside, refusing)
            return step(optimizer, *map(outside, args), **{name: outside(each) for name, each in kwargs.items()})

    optimizer_class.step = Optimizer.profile_hook_step(run)
    optimizer_class.step.hooked = True


def without_hooks(step: Any) -> Any:
    """Return the function that a class has given as ``step``, around which torch may have put one that runs hooks."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step


def sends_messages(kind: str) -> str:
    """Return the text of the error."""
    return (
        f"{kind} sends messages in its step, and ranks have different parts of a model: what comes from another rank "
        f"belongs to other parameters. Gradients are averaged over replicas before the step. Leave the messages out, "
        f"take an optimizer that sends none, such as AdamW, or train with replicas only."
    )


def _ended(kind: str, message: str) -> str:
    return f"{sends_messages(kind)} This step ended before {message}: what it had changed by then is changed."


class _NoMessages(TorchDispatchMode):
    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives no type
        self._kind = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(_ended(self._kind, str(func)))
        return func(*args, **(kwargs or {}))


class _NoCalls(AbstractContextManager[None]):
    """A context in which calls of process groups by this thread raise. Outside of it they cost nothing."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        methods = _methods()
        if not _stepping:
            for name, (_, refusing) in methods.items():
                setattr(ProcessGroup, name, refusing)
        _stepping[threading.get_ident()] = self._kind

    def __exit__(self, *error: object) -> None:
        _stepping.pop(threading.get_ident(), None)
        if not _stepping:
            for name, (method, _) in _methods().items():
                setattr(ProcessGroup, name, method)


@functools.cache
def _methods() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """The methods of process groups that send or receive, each with the one that raises."""
    listed = {name: each for name, each in vars(ProcessGroup).items() if name.lstrip("_").startswith(_SENDING)}
    return {name: (method, _refusing(name, method)) for name, method in listed.items() if callable(method)}


def _refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        kind = _stepping.get(threading.get_ident())
        if kind is not None:
            raise RuntimeError(_ended(kind, f"ProcessGroup.{name}"))
        return method(group, *args, **kwargs)

    return call


def _outside(refusing: AbstractContextManager[Any], given: Any) -> Any:
    """Return a closure that runs outside of ``refusing``; what is no function as it is."""
    if not callable(given):
        return given

    @functools.wraps(given)
    def run(*args: Any, **kwargs: Any) -> Any:
        refusing.__exit__(None, None, None)
        try:
            return given(*args, **kwargs)
        finally:
            refusing.__enter__()

    return run
