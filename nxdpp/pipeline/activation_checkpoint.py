"""Activation checkpointing of layers after the model is cut (``apply_checkpoint`` of NeuronX Distributed's guide)."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxdpp.ground.torch_names import COMPILED_CALL, pytree
from nxdpp.pipeline.recomputed_state import LayerState, RecomputedCall

_logger = logging.getLogger(__name__)

# Arguments with which apply_checkpoint recomputes.
_CHECKPOINT = {"use_reentrant": False, "preserve_rng_state": True}


class CheckpointedModel(Protocol):
    """The attributes of a wrapped model that checkpointing needs."""

    rank: int
    layers: list[str]
    stage_layers: list[str]
    original_module: nn.Module

    def local_named_modules(self, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return this rank's modules under their original names."""


def apply_checkpoint(model: CheckpointedModel, layers_to_checkpoint: Sequence[str] | None = None) -> None:
    """Recompute the forward of layers during their backward instead of keeping activations.

    Parameter names do not change. Dropout repeats in the recomputation, on the devices of all tensors that a layer
    gets. Buffers and attributes that forward changes, such as statistics and counters, have the values of the forward
    in the recomputation, which leaves them as they are. A step raises ``RuntimeError`` for a layer that depends on
    other state. The call is not collective: each rank checkpoints its own layers and skips names of other stages. A
    checkpointed layer stays as it is.

    Args:
        model: the wrapped model.
        layers_to_checkpoint: qualified names of modules; by default every transformer layer.

    Raises:
        RuntimeError: for an empty ``layers_to_checkpoint``.
        ValueError: for a module that holds layers.

    Logs a warning for names that the model does not have, and for a rank without layers.
    """
    if layers_to_checkpoint is None:
        if not model.stage_layers:
            _logger.warning("no transformer layer is on pipeline rank %d; nothing to checkpoint", model.rank)
        local = dict(model.local_named_modules())
        for name in model.stage_layers:
            _checkpoint(name, local[name])
        return
    if isinstance(layers_to_checkpoint, str) or len(layers_to_checkpoint) == 0:
        raise RuntimeError(
            f"layers_to_checkpoint={layers_to_checkpoint!r} names no layer in a list. Leave it out to checkpoint "
            f"every transformer layer, or give a list of names such as {list(model.layers[:1])}."
        )
    unknown = [name for name in layers_to_checkpoint if not _has(model.original_module, name)]
    if unknown:
        _logger.warning(
            "layers_to_checkpoint names %s, which do not exist in the model; its layers are %s",
            unknown,
            ", ".join(model.layers),
        )
    above = [name for name in layers_to_checkpoint if any(layer.startswith(f"{name}.") for layer in model.layers)]
    if above:
        raise ValueError(
            f"layers_to_checkpoint names {above}, which hold transformer layers and do not run as one module in a "
            f"pipeline. Name the layers themselves, {', '.join(model.layers)}."
        )
    local = dict(model.local_named_modules())
    for name in layers_to_checkpoint:
        if name in local and name not in unknown:
            _checkpoint(name, local[name])


def remove_checkpoint(model: CheckpointedModel) -> None:
    """Keep the activations of this rank's layers again, after ``apply_checkpoint``; not collective."""
    for module in dict(model.local_named_modules()).values():
        if is_checkpointed(module):
            _keep_activations(module)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether ``apply_checkpoint`` has changed ``module``."""
    return _checkpointed_call(module) is not None


def forward_within(module: nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """Return ``change`` of the forward of ``module``, which a checkpointed module computes again too."""
    forward = module.forward
    if isinstance(forward, functools.partial) and forward.func is _recomputed:
        return functools.partial(_recomputed, change(forward.args[0]), *forward.args[1:])
    return change(forward)


def compile_checkpointed(name: str, module: nn.Module, options: dict[str, Any]) -> None:
    """Compile ``module`` in place by ``torch.compile``'s ``options``. It stays checkpointed where it was."""
    was_checkpointed = is_checkpointed(module)
    if was_checkpointed:
        _keep_activations(module)
    module.compile(**options)
    if was_checkpointed:
        _checkpoint(name, module)


def _has(model: nn.Module, name: str) -> bool:
    # A class may override ``named_modules``.
    try:
        return model.get_submodule(name) is not model
    except AttributeError:
        return False


def _checkpoint(name: str, module: nn.Module) -> None:
    if is_checkpointed(module) or any(kind.__name__ == "CheckpointWrapper" for kind in type(module).__mro__):
        return
    # The instance's own forward is replaced, not the module: a wrapper would rename its parameters. Compiled code is
    # recomputed as a whole: the state is looked at outside of it.
    state = LayerState(name, module)
    if COMPILED_CALL.of(module) is None:
        module.forward = functools.partial(_recomputed, module.forward, state)
    else:
        module.forward = _ForwardOfCompiled(_forward_of_compiled, module.forward, state)
        COMPILED_CALL.set(module, functools.partial(_recomputed, COMPILED_CALL.of(module), state))


class _ForwardOfCompiled(functools.partial[Any]):
    """The forward of a module whose compiled code is recomputed. A copy has no compiled code, and recomputes it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_recomputed, *self.args)


def _forward_of_compiled(forward: Callable[..., Any], state: LayerState, /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _checkpointed_call(module: nn.Module) -> "functools.partial[Any] | None":
    calls = (COMPILED_CALL.of(module), module.forward)
    return next((each for each in calls if isinstance(each, functools.partial) and each.func is _recomputed), None)


def _keep_activations(module: nn.Module) -> None:
    call = _checkpointed_call(module)
    assert call is not None, "it is checkpointed"
    own = call.args[0]
    if call is COMPILED_CALL.of(module):
        COMPILED_CALL.set(module, own)
        assert isinstance(module.forward, _ForwardOfCompiled)
        own = module.forward.args[0]
    del module.forward
    if module.forward != own:
        module.forward = own


def _recomputed(forward: Callable[..., Any], state: LayerState, /, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` now, and again in the backward.

    ``checkpoint`` keeps the random state only of the devices of positional tensors. So an empty tensor of each other
    device is passed by position too.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    devices = _devices(kwargs) - _devices(args)
    witnesses = [torch.empty(0, device=device) for device in devices]
    if torch.compiler.is_compiling():
        return checkpoint(_run, forward, witnesses, *args, use_reentrant=False, **kwargs)
    call = RecomputedCall(state, forward)
    return checkpoint(call, witnesses, *args, use_reentrant=False, early_stop=not call.is_compared, **kwargs)


def _run(forward: Callable[..., Any], witnesses: list[torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _devices(values: Any) -> set[torch.device]:
    """The devices of the tensors in ``values`` other than the CPU, whose random state is kept in any case."""
    tensors = (value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor))
    return {tensor.device for tensor in tensors if tensor.device.type != "cpu"}


def enable_checkpointing(
    model: CheckpointedModel, settings: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> None:
    """Call ``apply_checkpoint`` for the layers of this rank that transformers does not recompute.

    Raises ``ValueError``, before anything is changed, for ``settings`` of another recomputation and for ``arguments``.
    """
    others = [f"{name}={value!r}" for name, value in (settings or {}).items() if _CHECKPOINT.get(name) is not value]
    if others or arguments:
        raise ValueError(
            f"gradient checkpointing of a pipelined model recomputes every layer with use_reentrant=False and "
            f"preserve_rng_state=True, and takes no {', '.join((*others, *arguments))}. Leave it out, or call "
            f"nxdpp.apply_checkpoint(model, layers_to_checkpoint=[...]) for some layers."
        )
    local = dict(model.local_named_modules())
    layers = [name for name in model.stage_layers if not is_recomputed(local[name])]
    if layers:
        apply_checkpoint(model, layers)


def disable_checkpointing(model: CheckpointedModel) -> None:
    """Keep the activations of this rank's layers."""
    remove_checkpoint(model)
    for module in dict(model.local_named_modules()).values():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]  # a flag of transformers' layers


def is_recomputed(module: nn.Module) -> bool:
    """Return whether ``module``, or transformers for it, recomputes its forward in the backward."""
    return is_checkpointed(module) or getattr(module, "gradient_checkpointing", False) is True
