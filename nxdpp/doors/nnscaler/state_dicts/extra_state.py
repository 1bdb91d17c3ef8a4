"""Extra state: a rank's state dict says which part of the whole it is, so that files of all ranks can be merged.

::

    {"version": 1, "rank": 3, "compute_config": {...},
     "names": all parameters of the whole module in order,    "state_names": all names of its state dict,
     "tied": [[names of one tensor]],                         "held": {name: place of this rank's tensor}}

An optimizer's state dict has ``names`` too, ``own``, the name of each of its parameters by index, and ``held``.

A rank's tensor has some ranges of the whole along one dimension. Its other elements are padding, which is zero::

    whole     0 1 2 3 4 5 6 7 8 9 10 11                   12 rows, padded to 16
    rank 0    0 1 2 3 4 5 6 7                             ranges [[0, 0, 8]]
    rank 1    8 9 10 11 · · · ·                           ranges [[8, 0, 4]]
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

VERSION = 1


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
        "held": _placements(part.state_dict(keep_vars=True)),
    }


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
    if saved["held"] != own["held"]:
        raise ValueError(
            f"the state dict is that of rank {saved['rank']} with {_sizes(saved)}, and this is rank {own['rank']} with "
            f"{_sizes(own)}: each rank loads what it has saved. For another plan call merge_state_dicts, and "
            f"load_merged_state_dict."
        )


def optimizer_extra_state(module: nn.Module, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the description of an optimizer's ``parameters``, in the order of their indices; not collective.

    ``module`` is the parallel module, or the module that has parallel ones in it.

    Raises ``ValueError`` for a parameter that is not in ``module``.
    """
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    unknown = [parameter for parameter in parameters if id(parameter) not in own]
    if unknown:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(unknown[0].shape)} that is not in the module: give "
            f"build_optimizer the module with all of its parameters."
        )
    extras = {prefix: each.nxdpp_extra_state() for prefix, each in parallel_modules(module).items()}
    # Of the original module in its order, each once, also if another rank holds them.
    original: list[str] = []
    for path, each in module.named_modules():
        prefix = f"{path}." if path else ""
        if prefix in extras:
            original += [f"{prefix}{name}" for name in extras[prefix]["names"]]
        elif not prefix.startswith(tuple(extras)):
            named = each.named_parameters(path, recurse=False)
            original += [name for name, parameter in named if own[id(parameter)] == name]
    names = [own[id(parameter)] for parameter in parameters]
    return {
        "version": VERSION,
        "rank": _rank(),
        "names": original,
        "own": names,
        "tied": [[f"{prefix}{name}" for name in group] for prefix in extras for group in extras[prefix]["tied"]],
        "held": _placements(dict(zip(names, parameters, strict=True))),
    }


def add_optimizer_extra_state(module: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict``, which ``optimizer`` made, with the description of its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {**state_dict, EXTRA_STATE_KEY: optimizer_extra_state(module, parameters)}


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
    if saved is None:
        return taken
    if (saved["own"], saved["held"]) != (own["own"], own["held"]):
        raise ValueError(
            f"the optimizer's state is that of rank {saved['rank']} with {counted(len(saved['own']), 'parameter')}, "
            f"and rank {own['rank']} has {len(own['own'])}, or other parts: each rank loads what it has saved. For "
            "another plan call merge_state_dicts, and load_merged_state_dict."
        )
    return taken


def _is_of_wholes(optimizer: Optimizer, state: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Return whether ``state`` is of whole parameters, of which this rank has parts."""
    if hasattr(optimizer, "shards"):
        return "shards" not in state
    places = [placement_in(own["held"][name]) for name in own["own"]]
    return any(
        place.shape != place.local_shape and getattr(value, "shape", None) == place.shape
        for index, place in enumerate(places)
        for value in state["state"].get(index, {}).values()
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


def fields_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the place of a parameter or buffer of this rank in the whole, as lists and numbers.

    Raises ``ValueError`` for a shard of ``fully_shard``.
    """
    if isinstance(tensor, DTensor):
        raise ValueError("state dicts of nnScaler's have no shards of fully_shard: use nxdpp.save_checkpoint.")
    whole, shape, dim, ranges, _ = placement_of(tensor)
    size = whole[dim] if dim >= 0 else 0
    return {"shape": list(shape), "dim": dim, "size": size, "ranges": [list(each) for each in ranges]}


def placement_in(fields: Mapping[str, Any]) -> PlaceInWhole:
    """Return the placement of ``fields_of``. Raises ``KeyError`` and ``TypeError`` for anything else."""
    shape, dim = tuple(fields["shape"]), fields["dim"]
    whole = shape if dim < 0 else (*shape[:dim], fields["size"], *shape[dim + 1 :])
    return PlaceInWhole(whole, shape, dim, tuple(Range(*each) for each in fields["ranges"]))


def joined(parts: Sequence[tuple[PlaceInWhole, int, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """Return the whole of ``parts``, which may repeat, and the number of elements that they lack.

    A tensor that is not divided is returned itself.

    Args:
        parts: for each a placement, the index of its first element in the flattened tensor of a rank, and its values:
            of the shape of the rank's tensor, or flattened.
    """
    placement, _, first = parts[0]
    if tuple(first.shape) == placement.shape:
        return first, 0
    whole, lacks = first.new_empty(placement.shape), torch.ones(placement.shape, dtype=torch.bool)
    for each, start, values in parts:
        for block in each.blocks(values, start):
            if lacks[block.region].any():
                whole[block.region] = block.values
                lacks[block.region] = False
    return whole, int(lacks.sum())


def _placements(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields_of(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def _sizes(extra: Mapping[str, Any]) -> str:
    config = extra["compute_config"]
    held = counted(len(extra["held"]), "tensor")
    return f"plan_ngpus={config['plan_ngpus']}, runtime_ngpus={config['runtime_ngpus']} and {held}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
