"""Check of a state dict before it is loaded: ``Module.load_state_dict`` finds errors after it has loaded the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.ground.torch_names import EXTRA_STATE, LOAD_OWN, LOAD_PRE_HOOKS
from nxdpp.tracing.modules import listings

_SHOWN = 10


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
