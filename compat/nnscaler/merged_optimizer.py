"""Merge of the optimizer states of all ranks into that of one process, and a rank's part of the merged state.

State that has a value for each element of a parameter is divided as the parameter is. Under ZeRO a rank has flat pieces
of its part::

    exp_avg of a weight, 2 tensor-parallel ranks x 2 units    rank 0: part 0, first half     rank 1: part 1, first half
                                                              rank 2: part 0, second half    rank 3: part 1, second half

Other state, such as the step, is a single number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.nnscaler.extra_state import EXTRA_STATE_KEY, VERSION, check_version, optimizer_extra_state
from nxdpp.nnscaler.placements import Placement, join

_MASTER = "master"
_NO_OPTIONS = ("params", "param_names")


@dataclass
class _Piece:
    """State of elements ``start`` to ``stop`` of a rank's flattened parameter, each value of ``shape``."""

    start: int
    stop: int
    shape: tuple[int, ...]
    values: Mapping[str, Any]


def merge_optimizers(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict of one optimizer over the parameters of the original module, from those of all ranks.

    Its indices count the parameters in the order of the original module. Values of master copies are beside the state.

    Raises ``ValueError`` for several parameter groups, for state that is no number and has not the shape of its
    parameter, and for ranks that do not fit together.
    """
    extras = [state[EXTRA_STATE_KEY] for state in states]
    for state, extra in zip(states, extras, strict=True):
        if extra["names"] != extras[0]["names"]:
            raise ValueError(f"the optimizer of rank {extra['rank']} is over other parameters than that of rank 0")
        _check_one_group(state)
    firsts = {name: group[0] for extra in extras for group in extra["tied"] for name in group}
    found: dict[str, dict[Placement, list[_Piece]]] = {}
    held: set[str] = set()
    for state, extra in zip(states, extras, strict=True):
        held |= {firsts.get(name, name) for name in extra["own"]}
        for name, placement, piece in _pieces(state, extra):
            found.setdefault(firsts.get(name, name), {}).setdefault(placement, []).append(piece)
    names = [name for name in extras[0]["names"] if firsts.get(name, name) in held]
    merged = {
        index: _whole_state(name, found[first])
        for index, name in enumerate(names)
        if (first := firsts.get(name, name)) in found
    }
    masters = {names[index]: values.pop(_MASTER) for index, values in merged.items() if _MASTER in values}
    options = _options(states[0]["param_groups"][0])
    return {
        "state": {index: values for index, values in merged.items() if values},
        "param_groups": [{**options, "params": list(range(len(names)))}],
        EXTRA_STATE_KEY: {"version": VERSION, "merged": names, "masters": masters},
    }


def divide_optimizer_state(module: nn.Module, optimizer: Optimizer, merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``optimizer`` of this rank loads of a ``merged`` state; not collective.

    ``merged`` may also be the state dict of an optimizer over ``parameters()`` of the original module.

    Raises ``ValueError`` for the state of other parameters, and for several parameter groups.
    """
    _check_one_group(merged)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    extra = optimizer_extra_state(module, parameters)
    own: dict[str, Any] = dict(optimizer.state_dict())
    own.pop(EXTRA_STATE_KEY, None)
    _check_one_group(own)
    indices, masters = _indices(extra, merged)
    placements = [Placement.from_dict(extra["held"][name]) for name in extra["own"]]

    def local(number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _part(extra["own"][number], key, value, placements[number]) for key, value in values.items()}

    states = [local(number, merged["state"].get(indices[name], {})) for number, name in enumerate(extra["own"])]
    own["param_groups"] = [{**own["param_groups"][0], **_options(merged["param_groups"][0])}]
    if "shards" not in own:
        own["state"] = {number: values for number, values in enumerate(states) if values}
        return own
    own["state"], own["masters"] = {}, {}
    for number, shard in enumerate(own["shards"]):
        index = shard["parameter"]
        if states[index]:
            own["state"][number] = {key: _cut(value, shard) for key, value in states[index].items()}
        master = masters.get(indices[extra["own"][index]])
        if master is not None:
            own["masters"][number] = _cut(placements[index].take(master), shard)
    return own


def _pieces(state: Mapping[str, Any], extra: Mapping[str, Any]) -> Iterator[tuple[str, Placement, _Piece]]:
    """The state of each parameter of a rank, or of its shards under ZeRO, with name and placement of the parameter."""
    for number, values in state["state"].items():
        shard = state["shards"][number] if "shards" in state else None
        name = extra["own"][number if shard is None else shard["parameter"]]
        placement = Placement.from_dict(extra["held"][name])
        if shard is None:
            yield name, placement, _Piece(0, prod(placement.shape), placement.shape, values)
            continue
        master = state["masters"].get(number)
        shape = (shard["stop"] - shard["start"],) if placement.shape else ()
        values = values if master is None else {**values, _MASTER: master}
        yield name, placement, _Piece(shard["start"], shard["stop"], shape, values)


def _whole_state(name: str, parts: Mapping[Placement, Sequence[_Piece]]) -> dict[str, Any]:
    """State of the whole parameter, of the pieces of each of its parts."""
    flats = {placement: _assembled(name, placement, pieces) for placement, pieces in parts.items()}
    keys = next(iter(flats.values()))
    whole: dict[str, Any] = {}
    for key in keys:
        values = [(placement, flat[key]) for placement, flat in flats.items()]
        first = values[0][1]
        if not isinstance(first, torch.Tensor) or tuple(first.shape) != values[0][0].shape:
            whole[key] = first
            continue
        joined = join(values)
        if joined is None:
            raise ValueError(f"{key} of {name} lacks elements: give the state dicts of all ranks")
        whole[key] = joined
    return whole


def _assembled(name: str, placement: Placement, pieces: Sequence[_Piece]) -> dict[str, Any]:
    """State of a rank's part of a parameter, of its flat pieces."""
    numel = prod(placement.shape)
    if pieces[0].stop - pieces[0].start == numel:
        pieces = pieces[:1]
    assembled: dict[str, Any] = {}
    for key, value in pieces[0].values.items():
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and placement.shape):
            assembled[key] = value
            continue
        if any(tuple(piece.values[key].shape) != piece.shape for piece in pieces):
            raise ValueError(
                f"{key} of {name} has shape {list(value.shape)}, and the parameter {list(placement.shape)}: only "
                f"optimizers whose state has the shape of the parameter, as that of Adam, can be merged"
            )
        flat, missing = value.new_empty(numel), torch.ones(numel, dtype=torch.bool)
        for piece in pieces:
            flat[piece.start : piece.stop] = piece.values[key].reshape(-1)
            missing[piece.start : piece.stop] = False
        if missing.any():
            raise ValueError(f"{key} of {name} lacks {int(missing.sum())} elements: give the state dicts of all ranks")
        assembled[key] = flat.view(placement.shape)
    return assembled


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
        raise ValueError(f"the optimizer's state is that of {count} parameters, and the module has {len(names)}")
    places = {name: index for index, name in enumerate(names)}
    for group in extra["tied"]:
        present = [places[name] for name in group if name in places]
        places |= dict.fromkeys(group, present[0]) if present else {}
    missing = [name for name in extra["own"] if name not in places]
    if missing:
        raise ValueError(f"the optimizer's state lacks {missing[0]}, which the optimizer has: it is of another module")
    return places, {places[name]: value for name, value in masters.items()}


def _part(name: str, key: str, value: Any, placement: Placement) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if tuple(value.shape) == placement.whole_shape:
        return placement.take(value).clone()
    if value.numel() > 1:
        raise ValueError(
            f"{key} of {name} has shape {list(value.shape)}, and the parameter {list(placement.whole_shape)}: the "
            f"state is that of another module or optimizer"
        )
    return value.clone()


def _cut(value: Any, shard: Mapping[str, Any]) -> Any:
    """Elements of ``shard`` of a value of the whole part; a single number as it is."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shard["shape"]) or not shard["shape"]:
        return value
    return value.reshape(-1)[shard["start"] : shard["stop"]].clone()


def _check_one_group(state: Mapping[str, Any]) -> None:
    count = len(state["param_groups"])
    if count != 1:
        raise ValueError(f"the optimizer has {count} parameter groups, and the state of one group can be merged")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_OPTIONS}
