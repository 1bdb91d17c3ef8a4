"""Extra state: a rank's state dict says which part of the whole it is, so that files of all ranks can be merged.

::

    {"version": 2, "rank": 3, "compute_config": {...},
     "names": all parameters of the whole module in order,    "state_names": all names of its state dict,
     "tied": [[names of one tensor]],                         "held": {name: place of this rank's tensor}}

An optimizer's state dict has ``names`` and ``held`` too, and ``own``, the name of each of its parameters by index. A
parameter of several names has the first one there. A place is a ``PlaceInWhole`` of plain tuples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.model_state import tied_in
from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole, placement_of
from nxdpp.counted import counted
from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.pipeline.local.own_save import state_of_all_names
from nxdpp.tensor.padding import Range

EXTRA_STATE_KEY = "nxdpp_extra_state"
"""Key of the extra state behind a parallel module's prefix, and in an optimizer's state dict."""

VERSION = 2


def module_extra_state(
    whole: nn.Module, part: nn.Module, config: ComputeConfig, tied: Sequence[Sequence[str]] | None = None
) -> dict[str, Any]:
    """Return the description of this rank's ``part`` of ``whole``; not collective.

    Args:
        whole: the module with all names; tensors that other ranks hold may be on the meta device.
        part: the module with this rank's tensors, under names of the whole one.
        config: ranks and settings of the parallel module.
        tied: the names of each tensor that has several, by default the names of one object in ``whole``.
    """
    state = state_of_all_names(whole)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    groups = tied_in(tensors) if tied is None else [list(names) for names in tied]
    others = {name for names in groups for name in names[1:]}
    return {
        "version": VERSION,
        "rank": _rank(),
        "compute_config": asdict(config),
        "names": [name for name, _ in whole.named_parameters(remove_duplicate=False) if name not in others],
        "state_names": list(state),
        "tied": groups,
        "held": _places(part.state_dict(keep_vars=True)),
    }


def first_names(extra: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the first name of each tensor that has several, by each of its names."""
    return {f"{prefix}{name}": f"{prefix}{names[0]}" for names in extra["tied"] for name in names}


def take_extra_state(state_dict: dict[str, Any], prefix: str, own: Mapping[str, Any]) -> None:
    """Remove the extra state behind ``prefix`` from ``state_dict``, and verify that its tensors are for this rank.

    A state dict without extra state is left as it is. ``own`` is the extra state of this rank.

    Raises ``ValueError`` for the state of a rank with different parts, or of a different module.
    """
    saved = state_dict.pop(f"{prefix}{EXTRA_STATE_KEY}", None)
    if saved is None:
        return
    check_version(saved)
    if saved["state_names"] != own["state_names"]:
        raise ValueError(
            f"the state dict is that of a module with {counted(len(saved['state_names']), 'tensor')}, and this one has "
            f"{len(own['state_names'])}, or others: build the module as before the save."
        )
    _check_parts("state dict", saved, own)


def add_optimizer_extra_state(module: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict``, which ``optimizer`` made, with the description of its parameters; not collective.

    ``module`` is the parallel module, or the module that has parallel ones in it.

    Raises ``ValueError`` for a parameter that is not in ``module``.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    unknown = [parameter for parameter in parameters if id(parameter) not in own]
    if unknown:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(unknown[0].shape)} that is not in the module: give "
            f"build_optimizer the module with all of its parameters."
        )
    extras = {prefix: each.nxdpp_extra_state() for prefix, each in parallel_modules(module).items()}
    firsts: dict[str, str] = {}
    # Of the original module in its order, each once, also if another rank holds them.
    original: list[str] = []
    for path, each in module.named_modules():
        prefix = f"{path}." if path else ""
        if prefix in extras:
            firsts |= first_names(extras[prefix], prefix)
            original += [f"{prefix}{name}" for name in extras[prefix]["names"]]
        elif not prefix.startswith(tuple(extras)):
            named = each.named_parameters(path, recurse=False)
            original += [name for name, parameter in named if own[id(parameter)] == name]
    names = [firsts.get(name, name) for name in map(own.__getitem__, map(id, parameters))]
    held = _places(dict(zip(names, parameters, strict=True)))
    extra = {"version": VERSION, "rank": _rank(), "names": original, "own": names, "held": held}
    return {**state_dict, EXTRA_STATE_KEY: extra}


def take_optimizer_extra_state(
    module: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``state_dict`` without the extra state, for ``optimizer`` to load.

    Raises ``ValueError`` for the state of a rank with different parts, and for a merged one.
    """
    taken = dict(state_dict)
    saved = taken.pop(EXTRA_STATE_KEY, None)
    own = add_optimizer_extra_state(module, optimizer, {})[EXTRA_STATE_KEY]
    if saved is not None:
        check_version(saved)
    if _is_of_wholes(optimizer, taken, own) if saved is None else "merged" in saved:
        raise ValueError("the optimizer's state is a merged one: load it with load_merged_state_dict")
    if saved is not None:
        _check_parts("optimizer's state", saved, own)
    return taken


def _is_of_wholes(optimizer: Optimizer, state: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Return whether ``state`` is of whole parameters, of which this rank has parts."""
    if hasattr(optimizer, "shards"):
        return "shards" not in state
    places = [place_in(own["held"][name]) for name in own["own"]]
    return any(
        place.shape != place.local_shape and getattr(value, "shape", None) == place.shape
        for index, place in enumerate(places)
        for value in state["state"].get(index, {}).values()
    )


def _check_parts(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where ``saved`` describes other tensors than ``own``."""
    if (saved.get("own"), saved["held"]) != (own.get("own"), own["held"]):
        raise ValueError(
            f"the {what} is that of rank {saved['rank']} with {counted(len(saved['held']), 'tensor')}, and this is "
            f"rank {own['rank']} with {len(own['held'])}, or other parts: each rank loads what it has saved. For "
            f"another plan call merge_state_dicts, and load_merged_state_dict."
        )


def check_names(what: str, missing: Sequence[str], unknown: Sequence[str], remedy: str) -> None:
    """Raise ``ValueError`` for names that ``what`` lacks, or that the module does not have."""
    if missing or unknown:
        raise ValueError(
            f"{what} does not fit the module: it lacks {missing[:3]} of {len(missing)}, and has unknown {unknown[:3]} "
            f"of {len(unknown)}. {remedy}"
        )


def parallel_modules(module: nn.Module) -> dict[str, Any]:
    """Return the parallel modules in ``module`` by prefix: ``""`` for itself, else a path with a dot at the end."""
    return {
        f"{path}." if path else "": each for path, each in module.named_modules() if hasattr(each, "nxdpp_extra_state")
    }


def check_version(saved: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an extra state that this version does not know."""
    if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
        raise ValueError(
            f"the extra state {saved!r:.60} is not of version {VERSION}: load it with the nxdpp that saved it."
        )


def place_in(fields: Sequence[Any]) -> PlaceInWhole:
    """Return the place of a tensor in ``held``."""
    place = PlaceInWhole(*fields)
    return place._replace(ranges=tuple(Range(*each) for each in place.ranges))


def _places(tensors: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The places of parameters and buffers of this rank. Raises ``ValueError`` for a shard of ``fully_shard``."""
    places = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ValueError("state dicts of nnScaler's have no shards of fully_shard: use nxdpp.save_checkpoint.")
        if isinstance(tensor, torch.Tensor):
            place = placement_of(tensor)
            places[name] = (*place[:3], tuple(map(tuple, place.ranges)), place.begin)
    return places


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
