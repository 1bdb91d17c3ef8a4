"""Copy of a module on the meta device, for tracing the graph that other ranks trace, with the modes of another."""

from typing import Any

import torch
from torch import nn

from nxdpp.tracing.modules import listings


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy ``module`` and its submodules, same classes and attributes, with all tensors on the meta device.

    Tensors and submodules that occur several times occur several times in the copy.
    """
    return _copy(module, {})


def copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the ``training`` and ``requires_grad`` of what has the same names in ``source``."""
    modules, parameters = dict(listings.named_modules(source)), dict(listings.named_parameters(source))
    for name, module in listings.named_modules(target):
        module.training = modules.get(name, source).training
    for name, parameter in listings.named_parameters(target):
        parameter.requires_grad_(parameters.get(name, parameter).requires_grad)


def _copy(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        copy: nn.Module = made[id(module)]
        return copy
    copy = made[id(module)] = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy)["_modules"] = {
        key: None if child is None else _copy(child, made) for key, child in module._modules.items()
    }
    for store in ("_parameters", "_buffers"):
        vars(copy)[store] = {
            key: None if tensor is None else made.setdefault(id(tensor), _on_meta(tensor))
            for key, tensor in vars(module)[store].items()
        }
    return copy


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
