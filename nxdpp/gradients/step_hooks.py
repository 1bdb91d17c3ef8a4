"""Functions that run before or after the step of every optimizer of this process, and may be removed in a step.

torch goes through its own list during the step. A hook that is removed there is an error where another hook follows. So
torch has one hook of each kind for good, which goes through a copy of the list here.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Function = Callable[[Optimizer], object]
_User = TypeVar("_User")

_before: list[Function] = []
_after: list[Function] = []
_registered: set[str] = set()


def run_before_steps(function: Function) -> Callable[[], None]:
    """Run ``function(optimizer)`` before each step; return a function that ends this."""
    return _add("before", _before, function, register_optimizer_step_pre_hook)


def run_before_steps_of(user: _User, function: Callable[[_User, Optimizer], object]) -> None:
    """Run ``function(user, optimizer)`` before each step, for as long as ``user`` is referred to elsewhere."""
    reference = weakref.ref(user)

    def run(optimizer: Optimizer) -> None:
        alive = reference()
        if alive is not None:
            function(alive, optimizer)

    weakref.finalize(user, run_before_steps(run))


def run_after_steps(function: Function) -> Callable[[], None]:
    """Run ``function(optimizer)`` after each step; return a function that ends this."""
    return _add("after", _after, function, register_optimizer_step_post_hook)


def _add(kind: str, functions: list[Function], function: Function, register: Callable[..., Any]) -> Callable[[], None]:
    def run_all(optimizer: Optimizer, *_: Any) -> None:
        for each in tuple(functions):
            each(optimizer)

    if kind not in _registered:
        register(run_all)
        _registered.add(kind)
    functions.append(function)

    def remove() -> None:
        if function in functions:
            functions.remove(function)

    return remove
