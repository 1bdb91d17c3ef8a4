"""Merge of the optimizer states of all ranks into the state of one process, and a rank's part of it.

State that has a value for each element of a parameter is divided as the parameter is. Under ZeRO a rank has flat pieces
of its part::

    exp_avg of a weight, 2 tensor-parallel ranks x 2 units    rank 0: part 0, first half     rank 1: part 1, first half
                                                              rank 2: part 0, second half    rank 3: part 1, second half

Other state, such as the step, is a single number.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole
from nxdpp.counted import counted
from nxdpp.doors.nnscaler.state_dicts.extra_state import (
    EXTRA_STATE_KEY,
    VERSION,
    check_version,
    joined,
    optimizer_extra_state,
    placement_in,
)
from nxdpp.gradients.optimizer.zero1_state import options_of

_MASTER = "master"

_Piece = tuple[PlaceInWhole, int, Any]
"""A value of the state on a rank: the place of the rank's parameter, the first element in it, and the value."""


def merge_optimizers(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict of one optimizer over the parameters of the original module, merged from all ranks.

    Its indices count the parameters in the order of the original module. The extra state has values of master copies,
    and the names where the optimizer has not all parameters; else there is none.

    Raises ``ValueError`` for several parameter groups, for state that is neither a number nor of the shape of its
    parameter, and for ranks that do not fit together.
    """
    extras = [state[EXTRA_STATE_KEY] for state in states]
    for state, extra in zip(states, extras, strict=True):
        if extra["names"] != extras[0]["names"]:
            raise ValueError(f"the optimizer of rank {extra['rank']} is over other parameters than that of rank 0")
        _check_one_group(state)
    firsts = {name: group[0] for extra in extras for group in extra["tied"] for name in group}
    found: dict[str, dict[str, list[_Piece]]] = {}
    held: set[str] = set()
    for state, extra in zip(states, extras, strict=True):
        held |= {firsts.get(name, name) for name in extra["own"]}
        for name, key, piece in _pieces(state, extra):
            found.setdefault(firsts.get(name, name), {}).setdefault(key, []).append(piece)
    names = [name for name in extras[0]["names"] if firsts.get(name, name) in held]
    merged = {
        index: {key: _whole(name, key, pieces) for key, pieces in found[first].items()}
        for index, name in enumerate(names)
        if (first := firsts.get(name, name)) in found
    }
    masters = {names[index]: values.pop(_MASTER) for index, values in merged.items() if _MASTER in values}
    options = options_of(states[0]["param_groups"][0])
    whole: dict[str, Any] = {
        "state": {index: values for index, values in merged.items() if values},
        "param_groups": [{**options, "params": list(range(len(names)))}],
    }
    if masters or names != extras[0]["names"]:
        whole[EXTRA_STATE_KEY] = {"version": VERSION, "merged": names, "masters": masters}
    return whole


def divide_optimizer_state(module: nn.Module, optimizer: Optimizer, merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``optimizer`` of this rank loads of a ``merged`` state; not collective.

    ``merged`` may also be the state dict of an optimizer over ``parameters()`` of the original module.

    Raises ``ValueError`` for the state of different parameters, and for several parameter groups.
    """
    _check_one_group(merged)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    extra = optimizer_extra_state(module, parameters)
    own: dict[str, Any] = dict(optimizer.state_dict())
    own.pop(EXTRA_STATE_KEY, None)
    _check_one_group(own)
    indices, masters = _indices(extra, merged)
    placements = [placement_in(extra["held"][name]) for name in extra["own"]]
    own["param_groups"] = [{**own["param_groups"][0], **options_of(merged["param_groups"][0])}]
    is_sharded = "shards" in own
    pieces = own["shards"] if is_sharded else [{"parameter": number} for number in range(len(placements))]
    own["state"] = {}
    if is_sharded:
        own["masters"] = {}
    for number, piece in enumerate(pieces):
        name, placement = extra["own"][piece["parameter"]], placements[piece["parameter"]]
        # A parameter without dimensions is not flattened.
        span = (piece["start"], piece["stop"]) if is_sharded and placement.shape else (0, None)
        if values := merged["state"].get(indices[name]):
            own["state"][number] = {key: _part(name, key, value, placement, *span) for key, value in values.items()}
        if is_sharded and (master := masters.get(indices[name])) is not None:
            own["masters"][number] = placement.part_of(master, *span).clone()
    return own


def _pieces(state: Mapping[str, Any], extra: Mapping[str, Any]) -> Iterator[tuple[str, str, _Piece]]:
    """The values of a rank's state with their parameter and key; those of shards under ZeRO, and their master copies.

    Raises ``ValueError`` for a value that is neither a number nor of the shape of its parameter or shard.
    """
    for number, values in state["state"].items():
        shard = state["shards"][number] if "shards" in state else {"parameter": number, "start": 0}
        name = extra["own"][shard["parameter"]]
        placement = placement_in(extra["held"][name])
        shape = (shard["stop"] - shard["start"],) if "stop" in shard and placement.shape else placement.local_shape
        master = state.get("masters", {}).get(number)
        for key, value in (values if master is None else {**values, _MASTER: master}).items():
            if not _is_number(value, placement) and tuple(value.shape) != shape:
                raise ValueError(
                    f"{key} of {name} has shape {list(value.shape)}, and the parameter {list(placement.local_shape)}: "
                    f"only optimizers whose state has the shape of the parameter, as that of Adam, can be merged"
                )
            yield name, key, (placement, shard["start"], value)


def _whole(name: str, key: str, pieces: Sequence[_Piece]) -> Any:
    """The value of the whole parameter ``name``, of its pieces on all ranks."""
    placement, _, value = pieces[0]
    if _is_number(value, placement):
        return value
    values, lacking = joined(pieces)
    if lacking:
        raise ValueError(f"{key} of {name} lacks {counted(lacking, 'element')}: give the state dicts of all ranks")
    return values.clone() if values is value else values


def _is_number(value: Any, placement: PlaceInWhole) -> bool:
    """Return whether ``value`` is not a value for each element of the parameter."""
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and placement.shape != ())


def _indices(extra: Mapping[str, Any], merged: Mapping[str, Any]) -> tuple[dict[str, int], dict[int, torch.Tensor]]:
    """The index in ``merged`` of each parameter of this rank, and the master copies by index."""
    saved = merged.get(EXTRA_STATE_KEY)
    count = len(merged["param_groups"][0]["params"])
    names, masters = extra["names"], {}
    if saved is not None:
        check_version(saved)
        if "merged" not in saved:
            raise ValueError("the optimizer's state is that of one rank: give what merge_state_dicts returned")
        names, masters = saved["merged"], saved["masters"]
    if len(names) != count:
        raise ValueError(
            f"the optimizer's state is that of {counted(count, 'parameter')}, and the module has {len(names)}"
        )
    places = {name: index for index, name in enumerate(names)}
    for group in extra["tied"]:
        present = [places[name] for name in group if name in places]
        places |= dict.fromkeys(group, present[0]) if present else {}
    missing = [name for name in extra["own"] if name not in places]
    if missing:
        raise ValueError(f"the optimizer's state lacks {missing[0]}, which the optimizer has: it is of another module")
    return places, {places[name]: value for name, value in masters.items()}


def _part(name: str, key: str, value: Any, placement: PlaceInWhole, start: int = 0, stop: int | None = None) -> Any:
    """The elements of the whole ``value`` that a rank or its shard has; a single number as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if tuple(value.shape) == placement.shape:
        return placement.part_of(value, start, stop).clone()
    if value.numel() > 1:
        raise ValueError(
            f"{key} of {name} has shape {list(value.shape)}, and the parameter {list(placement.shape)}: the state is "
            f"that of another module or optimizer"
        )
    return value.clone()


def _check_one_group(state: Mapping[str, Any]) -> None:
    count = len(state["param_groups"])
    if count != 1:
        raise ValueError(f"the optimizer has {count} parameter groups, and the state of one group can be merged")
