"""``torch.utils.checkpoint`` inside of a layer that is recomputed itself.

The layer's recomputation has ended when autograd asks for what an inner one has to compute again. So the state of the
layer at that place is put back once more::

    backward of the layer     recomputation of the layer ──▶ inner recomputations, the last one first
    state of the layer        of its forward                 of the place of each in the forward
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

Function = Callable[..., Any]
Keep = Callable[[Function], Function]

# Programs import ``checkpoint`` by name. It looks these up in its module.
_GENERATOR = "_checkpoint_without_reentrant_generator"
_FUNCTION = "CheckpointFunction"

_keep: ContextVar[Keep | None] = ContextVar("what a recomputation of an inner checkpoint runs", default=None)


@contextmanager
def inner_checkpoints(keep: Keep) -> Iterator[None]:
    """Let checkpoints in the block run ``keep(function)`` when they compute ``function`` again."""
    _follow()
    token = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(token)


@cache
def _follow() -> None:
    original = vars(checkpoint)[_GENERATOR]

    def generator(function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(_kept(function), *args, **kwargs)

    vars(checkpoint).update({_GENERATOR: generator, _FUNCTION: _Reentrant})


def _kept(function: Function) -> Function:
    keep = _keep.get()
    return function if keep is None else keep(function)


class _Reentrant(CheckpointFunction):
    """Runs the function in the forward too, unlike the generator."""

    @classmethod
    def apply(cls, function: Function, *args: Any) -> Any:
        """Run ``function`` now, and what is kept of it in the backward."""
        kept = _kept(function)
        runs = iter((function,))
        return CheckpointFunction.apply(lambda *inputs: next(runs, kept)(*inputs), *args)
