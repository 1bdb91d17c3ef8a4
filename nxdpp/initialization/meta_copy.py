"""Copy of a module on the meta device, for tracing the graph that other ranks trace."""

from typing import Any

import torch
from torch import nn

from nxdpp.ground.torch_names import BUFFERS, MODULES, PARAMETERS


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy ``module`` and its submodules, same classes and attributes, with all tensors on the meta device.

    Tensors and submodules that occur several times occur several times in the copy.
    """
    return _copy(module, {})


def _copy(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        copy: nn.Module = made[id(module)]
        return copy
    copy = made[id(module)] = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy)[MODULES.name] = {
        key: None if child is None else _copy(child, made) for key, child in MODULES.of(module).items()
    }
    for store in (PARAMETERS.name, BUFFERS.name):
        vars(copy)[store] = {
            key: None if tensor is None else made.setdefault(id(tensor), _on_meta(tensor))
            for key, tensor in vars(module)[store].items()
        }
    return copy


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
