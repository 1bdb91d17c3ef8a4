"""What a rank keeps of a model: a tree of its own modules under their original names, the rest freed."""

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.pipeline.partition.assignment import Owners

_freed = WeakIdKeyDictionary()
"""Stand-ins on the meta device for parameters that had values."""


def local_names(owners: Owners, rank: int) -> set[str]:
    """Names of the parameters, and of the buffers that change, that ``rank`` holds."""
    return {name for name, ranks in owners.items() if rank in ranks}


def names_elsewhere(owners: Owners, rank: int) -> set[str]:
    """Names of the parameters, and of the buffers that change, that only other ranks hold."""
    return {name for name, ranks in owners.items() if rank not in ranks}


def owners_by_rank(owners: Owners, rank_of: Callable[[int], int]) -> Owners:
    """For each name, the ranks that hold it; ``owners`` are stages."""
    return {name: {rank_of(stage) for stage in stages} for name, stages in owners.items()}


def tied_names(root: nn.Module, owners: Owners) -> list[tuple[list[str], list[int]]]:
    """Parameters that several ranks hold: the names of each, and its ranks.

    Ties are found by identity: one parameter under several names, or one module that several ranks use.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [(group, sorted(set().union(*(owners[name] for name in group)))) for group in names.values()]
    return [(group, ranks) for group, ranks in tied if len(ranks) > 1]


def shared_names(root: nn.Module) -> list[list[str]]:
    """The names of each parameter, and of each buffer, that has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for named in (root.named_parameters, root.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def build_local_module(
    root: nn.Module, local: Collection[str], layers: Collection[str], elsewhere: Collection[str] = ()
) -> nn.Module:
    """A tree that holds, under their original names, the modules of ``root`` whose parameters are ``local``.

    Modules without parameters are held too: what follows from the inputs alone is computed on every rank. Those
    with a buffer that is ``elsewhere``, because running them changes it, are not. Modules that stand above
    ``layers``, or whose parameters are on several ranks, are empty vessels with their own local parameters and
    buffers. The held modules and parameters are the same objects as in ``root``.
    """
    vessel = nn.Module()
    vessel.train(root.training)
    _fill(vessel, root, "", _Held(local, elsewhere), layers)
    return vessel


def check_has_values_here(root: nn.Module, local: Collection[str]) -> None:
    """Raise ``ValueError`` where ``free_others`` has taken the values of a parameter that is now ``local``."""
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if name in local and parameter in _freed:
            raise ValueError(
                f"{name} had values, which were freed when this {type(root).__name__} was wrapped before, for another "
                f"rank or with other cuts. Build the model again for each NxDPPModel."
            )


def free_others(root: nn.Module, local: Collection[str], elsewhere: Collection[str] = ()) -> None:
    """Put every parameter of ``root`` that is not ``local`` on the meta device, and the buffers beside it.

    Buffers that are ``elsewhere`` go, too. What was one parameter stays one.
    """
    held = _Held(local, elsewhere)
    replaced: dict[int, nn.Parameter] = {}
    # A module may stand in several places of the model, and be wanted here in one of them.
    prefixes: dict[nn.Module, list[str]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        prefixes.setdefault(module, []).append(prefix)
    for module, places in prefixes.items():
        for key, parameter in module._parameters.items():
            if parameter is not None and not any(_join(prefix, key) in local for prefix in places):
                meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module._parameters[key] = replaced.setdefault(id(parameter), meta)
                if not parameter.is_meta or parameter in _freed:
                    _freed[module._parameters[key]] = True
        for key, buffer in module._buffers.items():
            if buffer is not None and all(held.is_elsewhere(module, prefix) for prefix in places):
                module._buffers[key] = torch.empty_like(buffer, device="meta")


def _fill(vessel: nn.Module, module: nn.Module, prefix: str, held: "_Held", layers: Collection[str]) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None and _join(prefix, key) in held.local:
            vessel.register_parameter(key, parameter)
    for key, buffer in module._buffers.items():
        if buffer is not None and not held.is_elsewhere(module, prefix):
            vessel.register_buffer(key, buffer, persistent=key not in module._non_persistent_buffers_set)
    for key, child in module.named_children():
        name = _join(prefix, key)
        if held.is_elsewhere(child, name):
            continue
        if any(layer.startswith(f"{name}.") for layer in layers) or not held.is_whole(child, name):
            below = nn.Module()
            below.train(child.training)
            _fill(below, child, name, held, layers)
            vessel.add_module(key, below)
        else:
            vessel.add_module(key, child)


class _Held:
    """What one rank holds, asked module by module."""

    def __init__(self, local: Collection[str], elsewhere: Collection[str]) -> None:
        self.local = local
        self._elsewhere = elsewhere

    def is_elsewhere(self, module: nn.Module, prefix: str) -> bool:
        """Whether other ranks run ``module``, because all it has that belongs to a stage is there."""
        names = self._names(module, prefix)
        return bool(names) and not any(name in self.local for name in names)

    def is_whole(self, module: nn.Module, prefix: str) -> bool:
        """Whether all that ``module`` has is here."""
        return all(name in self.local for name in self._names(module, prefix))

    def _names(self, module: nn.Module, prefix: str) -> list[str]:
        parameters = [_join(prefix, key) for key, _ in module.named_parameters(remove_duplicate=False)]
        buffers = [_join(prefix, key) for key, _ in module.named_buffers(remove_duplicate=False)]
        return parameters + [name for name in buffers if name in self.local or name in self._elsewhere]


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
