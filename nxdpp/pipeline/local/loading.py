"""Loads of a state dict into the part of a model that a rank holds, and its check before one.

``Module.load_state_dict`` finds errors after it has loaded the rest.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.ground.torch_names import EXTRA_STATE, LOAD_OWN, LOAD_PRE_HOOKS, PARAMETERS, STATE_VERSIONS
from nxdpp.pipeline.local.own_save import state_of_all_names
from nxdpp.tensor.move_model_to_device import keep_attributes
from nxdpp.tensor.shards import with_rows_of
from nxdpp.tracing.modules import listings

_SHOWN = 10


def of_this_rank(
    state_dict: Mapping[str, Any], tree: nn.Module, root: nn.Module, tied: Sequence[Sequence[str]]
) -> Mapping[str, Any]:
    """Return ``state_dict`` for ``tree``: without the tensors that only other ranks hold, of shards this rank's rows.

    Of weights with several names, ``tied``, a file of Hugging Face has one, and so has ``named_parameters``.
    """
    own = tree.state_dict()
    elsewhere = set(state_of_all_names(root)) - own.keys()
    local = OrderedDict(
        (name, _as_own(value, own.get(name))) for name, value in state_dict.items() if name not in elsewhere
    )
    for names in tied:
        for given in [name for name in names if name in local][:1]:
            local = OrderedDict(dict.fromkeys(own.keys() & set(names), local[given])) | local
    if STATE_VERSIONS.held_by(state_dict):
        STATE_VERSIONS.set(local, STATE_VERSIONS.of(state_dict))
    return local


def load_assigning(tree: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Put the tensors of ``state_dict`` in the places of the parameters, whose attributes and ties are kept.

    Raises ``RuntimeError`` for an optimizer that holds a parameter to be replaced; nothing is replaced then.
    """
    stored = _stored_names(tree)
    before = dict(listings.named_parameters(tree, remove_duplicate=False))
    replaced = {name: old for name, old in before.items() if state_dict.get(stored[name], old) is not old}
    check_no_optimizer_holds(replaced, "Make the optimizer after load_state_dict(assign=True).")
    result = tree.load_state_dict(state_dict, strict=strict, assign=True)
    first: dict[int, nn.Parameter] = {}
    for name, old in replaced.items():
        owner, _, key = name.rpartition(".")
        new = first.setdefault(id(old), tree.get_parameter(name))
        PARAMETERS.of(tree.get_submodule(owner))[key] = new
        if not isinstance(state_dict[stored[name]], nn.Parameter):
            keep_attributes(old, new)
    watch_replaced(replaced)
    return result


def without_values(tree: nn.Module, state_dict: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of ``tree`` on the meta device for which ``state_dict`` has values, each once."""
    own = tree.state_dict(keep_vars=True)
    given = (tensor for name, tensor in own.items() if name in state_dict)
    return list({id(each): each for each in given if isinstance(each, torch.Tensor) and each.is_meta}.values())


def works_on_meta(function: Callable[[torch.Tensor], Any]) -> bool:
    """Return whether ``function``, which ``Module.to`` or ``half`` applies to tensors, runs on the meta device."""
    try:
        function(torch.empty(0, device="meta"))
    except NotImplementedError:
        return False
    return True


def _stored_names(tree: nn.Module) -> dict[str, str]:
    """The name in ``tree``'s state dict of each parameter; a wrapper such as ``CheckpointWrapper`` gives another."""
    stored: dict[int, deque[str]] = {}
    for name, value in tree.state_dict(keep_vars=True).items():
        stored.setdefault(id(value), deque()).append(name)
    parameters = listings.named_parameters(tree, remove_duplicate=False)
    return {
        name: stored[id(parameter)].popleft() if id(parameter) in stored else name for name, parameter in parameters
    }


def _as_own(value: Any, own: Any) -> Any:
    """``value`` of a state dict, or its rows where ``own`` is a shard."""
    if not isinstance(value, torch.Tensor) or not is_sharded(own) or is_sharded(value) or value.shape != own.shape:
        return value
    return with_rows_of(value, own)


def check_state(tree: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Raise ``RuntimeError`` if ``tree.load_state_dict(state_dict, strict)`` would, before anything is changed.

    Raise it for integers, booleans, complex numbers and floats of 8 bits in place of a float too: torch converts
    them without a word. Modules with a loader or with hooks of their own are left to these.
    """
    own = tree.state_dict(keep_vars=True)
    left_out = _LeftOut(tree)
    known = {name: tensor for name, tensor in own.items() if not left_out.has(name)}
    given = {name: value for name, value in state_dict.items() if not left_out.has(name)}
    problems = [text for name, tensor in known.items() if name in given for text in _misfit(name, tensor, given[name])]
    if strict:
        problems += _listed("Missing key(s) in state_dict", [name for name in known if name not in given])
        problems += _listed("Unexpected key(s) in state_dict", [name for name in given if name not in own])
    if problems:
        raise RuntimeError("Error(s) in loading state_dict. Nothing was loaded:\n\t" + "\n\t".join(problems))


class _LeftOut:
    """Names of tensors that modules of ``tree`` load in their own way."""

    def __init__(self, tree: nn.Module) -> None:
        self._below: list[str] = []
        self._direct: set[str] = set()
        for name, module in listings.named_modules(tree, remove_duplicate=False):
            if LOAD_PRE_HOOKS.of(module):
                self._below.append(f"{name}." if name else "")
            if LOAD_OWN.of(type(module)) is not LOAD_OWN.found:
                self._direct.add(name)

    def has(self, name: str) -> bool:
        owner, _, key = name.rpartition(".")
        return key == EXTRA_STATE.name or owner in self._direct or name.startswith(tuple(self._below))


def _misfit(name: str, tensor: torch.Tensor, value: Any) -> list[str]:
    if not isinstance(value, torch.Tensor):
        return [f"{name} must be a tensor, not a {type(value).__name__}."]
    # torch takes the first item for a number.
    is_number = tensor.ndim == 0 and value.ndim == 1
    if nn.parameter.is_lazy(tensor):
        return []
    if value.shape != tensor.shape and not is_number:
        return [
            f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, the shape in current "
            f"model is {tensor.shape}."
        ]
    if tensor.is_floating_point() and not _is_float_like(value.dtype, tensor.dtype):
        return [
            f"{name} is of {value.dtype} in the state dict, and of {tensor.dtype} in the model. It is not a weight of "
            f"this model; where it is one, convert it first: tensor.to({tensor.dtype})."
        ]
    return []


def _is_float_like(given: torch.dtype, expected: torch.dtype) -> bool:
    # Values of 8 bits need scales.
    return given == expected or (given.is_floating_point and given.itemsize > 1)


def _listed(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{title}: {', '.join(f'{name!r:.200}' for name in names[:_SHOWN])}{more}."]
