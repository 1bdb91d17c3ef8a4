"""``torch.utils.checkpoint`` in the modules of a pipeline, and the state of the modules in its recomputations.

In a layer under ``apply_checkpoint`` an inner checkpoint gets the state of its place in the forward. In other layers
torch recomputes with the present state, which a pipeline has changed by more forwards than one process::

    one process    F0  B0 with the buffers after F0      F1  B1
    first stage    F0  F1  B0 with the buffers after F1  B1

Such a module is refused. Its buffers are compared in its calls 1, 2, 4, 8, ...
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from nxdpp.devices.kinds import device_of
from nxdpp.ground.torch_names import CHECKPOINT_GENERATOR
from nxdpp.pipeline.local.changes import parameters_of_all_models
from nxdpp.tracing.modules import listings

Function = Callable[..., Any]
Keep = Callable[[Function], Function]

_keep: ContextVar[Keep | None] = ContextVar("what a recomputation of an inner checkpoint runs", default=None)
_calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@contextmanager
def inner_checkpoints(keep: Keep) -> Iterator[None]:
    """Let checkpoints in the block run ``keep(function)`` when they compute ``function`` again."""
    follow_checkpoints()
    token = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(token)


@cache
def follow_checkpoints() -> None:
    """Make torch's checkpoints in modules of a pipeline get their state, or raise ``RuntimeError`` in a backward."""
    checkpoint.CheckpointFunction = _Reentrant  # type: ignore[misc]  # a class of torch
    if not CHECKPOINT_GENERATOR.exists:
        _refuse_checkpoints()
        return
    original = CHECKPOINT_GENERATOR.found

    def generator(function: Function, *args: Any, **kwargs: Any) -> Any:
        kept = _kept(function)
        yield from original(kept, *args, **kwargs)
        _end_forward(kept)

    # Programs import ``checkpoint`` by name. It looks this up in its module, as the class above.
    CHECKPOINT_GENERATOR.replace(generator)


def _refuse_checkpoints() -> None:
    """Raise ``NameGoneError`` in checkpoints, whose recomputations would have another state than their forwards."""
    enter = saved_tensors_hooks.__enter__

    def checked_enter(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ == checkpoint.__name__ and parameters_of_all_models():
            raise CHECKPOINT_GENERATOR.gone()
        enter(hooks)

    saved_tensors_hooks.__enter__ = checked_enter  # type: ignore[method-assign]  # a class of torch


class _Reentrant(CheckpointFunction):
    """Runs the function in the forward too, unlike the generator."""

    @classmethod
    def apply(cls, function: Function, *args: Any) -> Any:
        """Run ``function`` now, and what is kept of it in the backward."""
        kept = _kept(function)
        # A trace refuses the function by what it is.
        if kept is function or any(isinstance(arg, fx.Proxy) for arg in args):
            return CheckpointFunction.apply(function, *args)
        runs = iter((function,))
        output = CheckpointFunction.apply(lambda *inputs: next(runs, kept)(*inputs), *args)
        _end_forward(kept)
        return output


class _Compared:
    """A function of ``module``, to be computed again with the buffers that the module has after the forward."""

    def __init__(self, function: Function, module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._after: dict[str, torch.Tensor] = {}

    def end_forward(self) -> None:
        """Note the buffers."""
        self._after = {name: buffer.detach().clone() for name, buffer in self._buffers()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it again. Raises ``RuntimeError`` for buffers that have changed."""
        for name, buffer in self._buffers():
            after = self._after.get(name, buffer)
            if after.shape == buffer.shape and not torch.equal(after, buffer):
                raise RuntimeError(
                    f"{type(self._module).__name__} computes its forward again (torch.utils.checkpoint) after later "
                    f"microbatches have changed its buffer {name}; in one process they change it afterwards. Switch "
                    f"this checkpoint off, and call nxdpp.apply_checkpoint(model) after wrapping: each layer is then "
                    f"computed again with the state of its forward."
                )
        return self._function(*args, **kwargs)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = listings.named_buffers(self._module)
        return ((name, buffer) for name, buffer in named if not device_of(buffer.device).is_lazy)


def _end_forward(kept: Function) -> None:
    if isinstance(kept, _Compared):
        kept.end_forward()


def _kept(function: Function) -> Function:
    keep = _keep.get()
    if keep is not None:
        return keep(function)
    module = _module_of(function)
    if module is None or not torch.is_grad_enabled():
        return function
    number = _calls[module] = _calls.get(module, 0) + 1
    is_compared = not number & (number - 1) and next(listings.buffers(module), None) is not None
    return _Compared(function, module) if is_compared and _is_of_a_pipeline(module) else function


def _module_of(function: Any) -> nn.Module | None:
    """The module that ``function`` belongs to: a module, a method of one, or a ``partial`` of it."""
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "__self__", function)
    return found if isinstance(found, nn.Module) else None


def _is_of_a_pipeline(module: nn.Module) -> bool:
    known = set(map(id, parameters_of_all_models()))
    return any(id(parameter) in known for parameter in listings.parameters(module))
