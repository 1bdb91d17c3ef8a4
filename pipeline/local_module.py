"""What a rank keeps of a model: a tree of its own modules under their original names, the rest freed."""

from collections.abc import Collection

import torch
from torch import nn

from nxdpp.pipeline.placement import Owners


def local_names(owners: Owners, stage: int) -> set[str]:
    """Names of the parameters that ``stage`` holds."""
    return {name for name, stages in owners.items() if stage in stages}


def tied_names(root: nn.Module, owners: Owners) -> list[tuple[list[str], list[int]]]:
    """Parameters that several stages hold: the names of each, and its stages.

    Ties are found by identity: one parameter under several names, or one module that several stages use.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [(group, sorted(set().union(*(owners[name] for name in group)))) for group in names.values()]
    return [(group, stages) for group, stages in tied if len(stages) > 1]


def build_local_module(root: nn.Module, local: Collection[str], layers: Collection[str]) -> nn.Module:
    """A tree that holds, under their original names, the modules of ``root`` whose parameters are ``local``.

    Modules without parameters are held too: what follows from the inputs alone is computed on every rank.
    Modules that stand above ``layers``, or whose parameters are on several stages, are empty vessels with their
    own local parameters and buffers. The held modules and parameters are the same objects as in ``root``.
    """
    vessel = nn.Module()
    vessel.train(root.training)
    _fill(vessel, root, "", local, layers)
    return vessel


def free_others(root: nn.Module, local: Collection[str]) -> None:
    """Put every parameter of ``root`` that is not ``local`` on the meta device, and the buffers beside it.

    What was one parameter stays one.
    """
    replaced: dict[int, nn.Parameter] = {}
    for prefix, module in root.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and _join(prefix, key) not in local:
                meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module._parameters[key] = replaced.setdefault(id(parameter), meta)
        for key, buffer in module._buffers.items():
            if buffer is not None and _is_elsewhere(module, prefix, local):
                module._buffers[key] = torch.empty_like(buffer, device="meta")


def write_back(tree: nn.Module, root: nn.Module) -> None:
    """Give ``root`` the parameters and buffers that the vessels of its local ``tree`` hold now."""
    for name, vessel in tree.named_modules():
        if type(vessel) is nn.Module:
            original = root.get_submodule(name)
            original._parameters.update(vessel._parameters)
            original._buffers.update(vessel._buffers)


def _fill(vessel: nn.Module, module: nn.Module, prefix: str, local: Collection[str], layers: Collection[str]) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None and _join(prefix, key) in local:
            vessel.register_parameter(key, parameter)
    for key, buffer in module._buffers.items():
        if buffer is not None and not _is_elsewhere(module, prefix, local):
            vessel.register_buffer(key, buffer, persistent=key not in module._non_persistent_buffers_set)
    for key, child in module.named_children():
        name = _join(prefix, key)
        if _is_elsewhere(child, name, local):
            continue
        if any(layer.startswith(f"{name}.") for layer in layers) or not _is_all_here(child, name, local):
            below = nn.Module()
            below.train(child.training)
            _fill(below, child, name, local, layers)
            vessel.add_module(key, below)
        else:
            vessel.add_module(key, child)


def _parameter_names(module: nn.Module, prefix: str) -> list[str]:
    return [_join(prefix, key) for key, _ in module.named_parameters(remove_duplicate=False)]


def _is_elsewhere(module: nn.Module, prefix: str, local: Collection[str]) -> bool:
    names = _parameter_names(module, prefix)
    return bool(names) and not any(name in local for name in names)


def _is_all_here(module: nn.Module, prefix: str, local: Collection[str]) -> bool:
    return all(name in local for name in _parameter_names(module, prefix))


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
