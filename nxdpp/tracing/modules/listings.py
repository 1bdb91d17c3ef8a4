"""Modules, parameters and buffers of a module, from the registries of ``nn.Module``.

A class may override ``named_parameters``: ``CheckpointWrapper`` gives names that no module has. Its registries have
the true ones.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from nxdpp.ground.torch_names import BUFFERS, MODULES, PARAMETERS

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

# Classes of torch that run one module, to which they give no public name.
_WRAPPERS = ("CheckpointWrapper", "OptimizedModule")


def named_modules(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """All modules in ``module`` with their qualified names, itself first, as ``nn.Module.named_modules`` gives them."""
    seen: set[nn.Module] = set()
    pending = [("", module)]
    while pending:
        name, child = pending.pop()
        if remove_duplicate:
            if child in seen:
                continue
            seen.add(child)
        yield name, child
        if MODULES.of(child):
            prefix = f"{name}." if name else ""
            pending += [(prefix + key, part) for key, part in reversed(MODULES.of(child).items()) if part is not None]


def named_parameters(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters in ``module`` with their qualified names."""
    return _named(module, PARAMETERS.of, remove_duplicate)


def named_buffers(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """All buffers in ``module`` with their qualified names."""
    return _named(module, BUFFERS.of, remove_duplicate)


def _named(
    module: nn.Module, registry: Callable[[nn.Module], Mapping[str, _Tensor | None]], remove_duplicate: bool
) -> Iterator[tuple[str, _Tensor]]:
    seen: set[_Tensor] = set()
    for name, child in named_modules(module, remove_duplicate):
        for key, tensor in registry(child).items():
            if tensor is not None and tensor not in seen:
                if remove_duplicate:
                    seen.add(tensor)
                yield f"{name}.{key}" if name else key, tensor


def modules(module: nn.Module) -> Iterator[nn.Module]:
    """All modules in ``module``, itself first."""
    return (child for _, child in named_modules(module))


def parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters in ``module``."""
    return (parameter for _, parameter in named_parameters(module))


def buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    """All buffers in ``module``."""
    return (buffer for _, buffer in named_buffers(module))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that ``checkpoint_wrapper`` or ``torch.compile`` has wrapped; any other ``module`` itself."""
    while type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
        ((_, inner),) = MODULES.of(module).items()
        if inner is None:
            break
        module = inner
    return module


def submodule(root: nn.Module, name: str) -> nn.Module:
    """``root.get_submodule(name)`` from the registries: while fx traces, the tracer answers each read of a module."""
    module: nn.Module | None = root
    for part in name.split(".") if name else ():
        module = MODULES.of(module).get(part) if module is not None else None
    return root.get_submodule(name) if module is None else module
