"""A context in which modules are built with their parameters on a device, above all the meta device."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nxdpp.initialization.recorder import is_recording

# What transformers sets on modules and tensors that have their values, and need not be initialised again.
_INITIALISED = "_is_hf_initialized"


class _Contexts(threading.local):
    """This thread's contexts, the innermost last; None for one of another device than meta."""

    def __init__(self) -> None:
        self.stack: list[_MetaContext | None] = []


_contexts = _Contexts()


@contextmanager
def init_on_device(device: torch.device | str | int) -> Iterator[None]:
    """Modules built in this context have their parameters on ``device``.

    On the meta device a parameter gives its memory back as soon as a module registers it: what is held is at most
    the one that is being made. It stays the same object, with its class, ``requires_grad``, attributes and
    sharing. Buffers are made as always, with values on the CPU, those that no checkpoint has (rotary ``inv_freq``,
    causal masks) among them; only one computed from a parameter is on the meta device, too. What the constructor
    draws for parameters is not drawn; what it draws for buffers is. transformers' marks of what is initialised are
    taken off the modules and parameters made here, so that a later ``initialize_weights()`` reaches them.

    Parameters get their values later, from ``load_pretrained``, a ``param_init_fn``, ``_init_weights`` of transformers'
    models or ``reset_parameters``: what else a constructor does to them (``self.apply(self._init)``) is lost, and what
    ``deferred_init`` is for.

    On any other device it does what ``with torch.device(device)`` does. Contexts nest: the innermost one counts.
    Only modules built in the same thread are concerned. Not collective.

    Source: the pipeline guide of NeuronX Distributed, "Using meta device for initialization".

    Raises:
        TypeError, ValueError: for what is no device.
        ValueError: while building, for a parameter that cannot go to the meta device: a lazy one, which has no
            shape yet, a tensor subclass that wraps others, or one of which there are views already.
        RuntimeError: inside a constructor that ``deferred_init`` runs; while building, for a parameter that
            transformers' ``from_pretrained`` has loaded.
    """
    target = _as_device(device)
    if is_recording():
        raise RuntimeError(
            "init_on_device inside a constructor that deferred_init runs: deferred_init allocates nothing anyway, "
            "so leave the inner context out"
        )
    with ExitStack() as exits:
        context = _MetaContext() if target.type == "meta" else None
        _contexts.stack.append(context)
        exits.callback(_contexts.stack.pop)
        if context is None:
            exits.enter_context(target)
        else:
            exits.callback(context.forget_initialised)
            for hook in context.register_hooks():
                exits.callback(hook.remove)
        yield


def is_on_meta() -> bool:
    """Whether ``init_on_device`` of the meta device is this thread's innermost context."""
    return bool(_contexts.stack) and _contexts.stack[-1] is not None


class _MetaContext:
    """What one context on the meta device does to modules that are built in it."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parameters: list[nn.Parameter] = []

    def register_hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            register_module_parameter_registration_hook(self._take_parameter),
            register_module_buffer_registration_hook(self._note_module),
            register_module_module_registration_hook(self._note_module),
        ]

    def forget_initialised(self) -> None:
        for module in self._modules:
            # Modules that register nothing (activations) are not in the set, and no hook tells of them.
            for one in (module, *filter(_has_nothing, module.children())):
                vars(one).pop(_INITIALISED, None)
        for parameter in self._parameters:
            vars(parameter).pop(_INITIALISED, None)

    def _is_innermost(self) -> bool:
        return bool(_contexts.stack) and _contexts.stack[-1] is self

    def _note_module(self, module: nn.Module, name: str, value: object) -> None:
        if self._is_innermost():
            self._modules.add(module)

    def _take_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if not self._is_innermost():
            return
        self._modules.add(module)
        if not parameter.is_meta:
            if getattr(parameter, _INITIALISED, False):
                raise RuntimeError(
                    f"parameter {name} of {type(module).__name__} has the values of a checkpoint (from_pretrained?), "
                    f"and init_on_device(torch.device('meta')) would throw them away. Build the model by its "
                    f"constructor, CLASS(config), wrap it, and call nxdpp.load_pretrained(model, DIRECTORY)."
                )
            _to_meta(parameter, f"{name} of {type(module).__name__}")
            self._parameters.append(parameter)


def _has_nothing(module: nn.Module) -> bool:
    return not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())


def _to_meta(parameter: nn.Parameter, place: str) -> None:
    """Put ``parameter`` on the meta device, the object staying what it is."""
    if is_lazy(parameter):
        raise ValueError(f"parameter {place} is lazy, it has no shape yet: build the module with its sizes given")
    if is_traceable_wrapper_subclass(parameter):
        raise ValueError(
            f"parameter {place} is a {type(parameter).__name__}, which wraps other tensors: build this module "
            f"outside init_on_device(torch.device('meta'))"
        )
    kind, attributes = type(parameter), vars(parameter)
    # Plain tensors and parameters differ in what swapping checks, so both sides are of the same class.
    meta = torch.Tensor._make_subclass(kind, torch.empty_like(parameter.detach(), device="meta"))
    meta.requires_grad_(parameter.requires_grad)
    vars(meta).update(attributes)
    try:
        torch.utils.swap_tensors(parameter, meta)
    except RuntimeError as error:
        raise ValueError(
            f"parameter {place} cannot go to the meta device, because there are views or weak references of it: "
            f"register it before they are made"
        ) from error


def _as_device(device: torch.device | str | int) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device must be a torch.device such as torch.device('meta'), not {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is none that torch knows: {str(error).splitlines()[0]}") from error
