"""Errors for a step that sends messages itself, over a part of a model.

An optimizer that shares its work over ranks, or averages over them, takes the lists of all ranks for equal. Those of
stages hold other layers, which it would mix. The first step of a declared class runs under a mode of torch that sees
each operation, and raises at the first message in place of sending it. A closure may send: it runs outside the mode.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.ground.torch_names import TorchDispatchMode

_HOOKED = Optimizer.profile_hook_step(lambda optimizer: None).__code__

_watched = WeakIdKeyDictionary()


def watch_next_step(optimizer: Optimizer) -> None:
    """Let the next step of ``optimizer``, of a class of ``refuse_messages``, raise ``RuntimeError`` where it sends."""
    _watched[optimizer] = True


def refuse_messages(optimizer_class: Any) -> None:
    """Let optimizers of this class be watched, those that are there too."""
    step = without_hooks(optimizer_class.step)

    @functools.wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not _watched.pop(optimizer, False):
            return step(optimizer, *args, **kwargs)
        mode = _NoMessages(type(optimizer).__name__)
        with mode:
            outside = functools.partial(_outside, mode)
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


class _NoMessages(TorchDispatchMode):
    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives no type
        self._kind = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(
                f"{sends_messages(self._kind)} This step ended before {func}: what it had changed by then is changed."
            )
        return func(*args, **(kwargs or {}))


def _outside(mode: TorchDispatchMode, given: Any) -> Any:
    """Return a closure that runs outside of ``mode``; what is no function as it is."""
    if not callable(given):
        return given

    @functools.wraps(given)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _left(mode):
            return given(*args, **kwargs)

    return run


@contextmanager
def _left(mode: Any) -> Iterator[None]:
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
