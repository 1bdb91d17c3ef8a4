"""Context in which modules are built with their parameters on a device, mostly the meta device.

A hook moves each parameter to the meta device when its module registers it. Buffers are computed as usual.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.parameter import is_lazy

from nxdpp.ground.transformers_names import IS_INITIALIZED
from nxdpp.initialization.recorder import is_recording

# transformers sets this attribute on modules and tensors that are already initialised.
_INITIALISED = IS_INITIALIZED.name


class _Contexts(threading.local):
    """This thread's contexts, the innermost last; None for a device other than meta."""

    def __init__(self) -> None:
        self.stack: list[_MetaContext | None] = []


_contexts = _Contexts()


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool = False, force_custom_init_on_device: bool = False
) -> Iterator[None]:
    """Build modules with their parameters on ``device``; not collective.

    On the meta device the memory of a parameter is freed when a module registers it. So at most one parameter is in
    memory. It stays the same object, with its class, ``requires_grad``, attributes and ties. Buffers are computed on
    the CPU, as buffers that no checkpoint has (rotary ``inv_freq``, causal masks) must be. Only a buffer that is
    computed from a registered parameter is on the meta device. The marks that transformers gives to initialised
    modules and parameters are removed. A later ``initialize_weights()`` then initialises them.

    The initial weights come later: from ``load_pretrained``, a ``param_init_fn``, ``_init_weights`` of transformers'
    models or ``reset_parameters``. Other initialisation in a constructor (``self.apply(self._init)``) is lost: use
    ``deferred_init`` for it.

    With ``include_buffers`` all buffers are on the meta device too. A checkpoint, or an initialiser of the module, has
    to give them values then. ``force_custom_init_on_device`` chooses between two implementations in NxD. There is one
    here, and it keeps ties, so both values give the same.

    Any other device works as in ``with torch.device(device)``. Of nested contexts the innermost one counts. The
    context applies only to the current thread. The name comes from the pipeline guide of NeuronX Distributed.

    Raises:
        TypeError, ValueError: for an invalid device.
        ValueError: while building, for a parameter that cannot be on the meta device: a lazy one, which has no shape
            yet, a tensor subclass that wraps others, or one that has views already.
        RuntimeError: inside a constructor that ``deferred_init`` runs; while building, for a parameter that
            transformers' ``from_pretrained`` has loaded.
    """
    target = _as_device(device)
    if is_recording():
        raise RuntimeError(
            "init_on_device is called in a constructor that deferred_init runs: deferred_init allocates no memory "
            "itself, so remove the inner context"
        )
    with ExitStack() as exits:
        context = _MetaContext(include_buffers) if target.type == "meta" else None
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
    """Return whether this thread's innermost context is ``init_on_device`` of the meta device."""
    return bool(_contexts.stack) and _contexts.stack[-1] is not None


class _MetaContext:
    """One context on the meta device, and the modules and parameters that were built in it."""

    def __init__(self, include_buffers: bool) -> None:
        self._include_buffers = include_buffers
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parameters: list[nn.Parameter] = []

    def register_hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            all_modules.register_module_parameter_registration_hook(self._take_parameter),
            all_modules.register_module_buffer_registration_hook(self._take_buffer),  # type: ignore[arg-type]  # may return one
            all_modules.register_module_module_registration_hook(self._note_module),
        ]

    def forget_initialised(self) -> None:
        for module in self._modules:
            # No hook sees modules that register no tensor (activations), so they are reached from their parents.
            for marked in (module, *filter(_has_no_tensors, module.children())):
                vars(marked).pop(_INITIALISED, None)
        for parameter in self._parameters:
            vars(parameter).pop(_INITIALISED, None)

    def _is_innermost(self) -> bool:
        return bool(_contexts.stack) and _contexts.stack[-1] is self

    def _note_module(self, module: nn.Module, name: str, value: object) -> None:
        if self._is_innermost():
            self._modules.add(module)

    def _take_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        self._note_module(module, name, buffer)
        if not self._include_buffers or not self._is_innermost() or buffer is None or buffer.is_meta:
            return None
        return torch.empty_like(buffer, device="meta")

    def _take_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if not self._is_innermost():
            return
        self._modules.add(module)
        if not parameter.is_meta:
            if getattr(parameter, _INITIALISED, False):
                raise RuntimeError(
                    f"parameter {name} of {type(module).__name__} has the values of a checkpoint (from_pretrained?), "
                    f"which init_on_device(torch.device('meta')) would discard. Build the model by its constructor, "
                    f"CLASS(config), wrap it, and call nxdpp.load_pretrained(model, DIRECTORY)."
                )
            _to_meta(parameter, f"{name} of {type(module).__name__}")
            self._parameters.append(parameter)


def _has_no_tensors(module: nn.Module) -> bool:
    return not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())


def _to_meta(parameter: nn.Parameter, place: str) -> None:
    """Move ``parameter`` to the meta device; it stays the same object."""
    if is_lazy(parameter):
        raise ValueError(f"parameter {place} is lazy and has no shape yet: build the module with explicit sizes")
    if hasattr(parameter, "__tensor_flatten__"):
        raise ValueError(
            f"parameter {place} is a {type(parameter).__name__}, which wraps other tensors: build this module "
            f"outside init_on_device(torch.device('meta'))"
        )
    kind, attributes = type(parameter), vars(parameter)
    # swap_tensors needs two tensors of the same class.
    meta = nn.Parameter.__new__(kind, torch.empty_like(parameter.detach(), device="meta"), parameter.requires_grad)
    vars(meta).update(attributes)
    try:
        torch.utils.swap_tensors(parameter, meta)
    except RuntimeError as error:
        raise ValueError(
            f"parameter {place} cannot move to the meta device, because it has views or weak references: "
            f"register it before they are made"
        ) from error


def _as_device(device: torch.device | str | int) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device must be a torch.device such as torch.device('meta'), not {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"torch does not know the device {device!r}: {str(error).splitlines()[0]}") from error
