"""Merged state dicts: the ranks' parts joined into those of the original module and optimizer, for a load in any plan.

State that has a value for each element of a parameter is divided as the parameter is. Under ZeRO a rank has flat pieces
of its part::

    exp_avg of a weight, 2 tensor-parallel ranks x 2 units    rank 0: part 0, first half     rank 1: part 1, first half
                                                              rank 2: part 0, second half    rank 3: part 1, second half

Other state, such as the step, is a single number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole
from nxdpp.counted import counted
from nxdpp.doors.nnscaler.state_dicts.extra_state import (
    EXTRA_STATE_KEY,
    VERSION,
    add_optimizer_extra_state,
    check_names,
    check_version,
    first_names,
    parallel_modules,
    place_in,
)
from nxdpp.gradients.optimizer.zero1_state import options_of
from nxdpp.ranks import parallel_state

K = TypeVar("K")

_MASTER = "master"
_OF_A_JOB = ("names", "state_names", "tied", "compute_config")
"""Entries of the extra state that are equal on all ranks."""


def merge_state_dicts(
    module_state_dicts: Sequence[Mapping[str, Any]],
    optimizer_state_dicts: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the state dicts of the original module and of an optimizer over its parameters; needs no ranks.

    The optimizer's state dict counts the parameters in the original module's order, so ``torch.optim.Adam`` over its
    ``parameters()`` loads it. Its extra state has values of master copies, and the names where the optimizer has not
    all parameters; else there is none. Tensors of the module that are not divided are the given objects.

    Args:
        module_state_dicts: of all ranks in any order, whole or deduplicated.
        optimizer_state_dicts: likewise, of optimizers that ``build_optimizer`` made.

    Raises:
        ValueError: for dicts that are not of exactly all ranks of one job, for state dicts without a parallel module,
            and for optimizers with several groups, or with state of a different shape than its parameter.
    """
    for state in module_state_dicts:
        if not _extras(state):
            raise ValueError(
                f"a state dict has no {EXTRA_STATE_KEY}: give what state_dict() or deduped_state_dict() of a parallel "
                f"module returned on each rank."
            )
        for extra in _extras(state).values():
            check_version(extra)
    states = sorted(module_state_dicts, key=_rank_of)
    ranks: int = next(iter(_extras(states[0]).values()))["compute_config"]["runtime_ngpus"] if states else 0
    _check_ranks("state dicts", [_rank_of(state) for state in states], ranks)
    for rank, state in enumerate(states):
        if _job_of(state) != _job_of(states[0]):
            raise ValueError(f"the state dicts of ranks 0 and {rank} are those of other modules or jobs: give one save")
    merged = _merged_module(states)
    if optimizer_state_dicts is None:
        return merged, None
    for state in optimizer_state_dicts:
        if "own" not in state.get(EXTRA_STATE_KEY, {}):
            raise ValueError(
                f"an optimizer's state dict has no {EXTRA_STATE_KEY} of a rank: make the optimizer with build_optimizer"
            )
        check_version(state[EXTRA_STATE_KEY])
    optimizers = sorted(optimizer_state_dicts, key=lambda state: state[EXTRA_STATE_KEY]["rank"])
    _check_ranks("optimizer state dicts", [state[EXTRA_STATE_KEY]["rank"] for state in optimizers], ranks)
    return merged, _merged_optimizer(optimizers)


def load_merged_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Load this rank's part of merged state dicts; not collective, and each rank calls it with the same dicts.

    Args:
        module: a parallel module, or a module that has parallel ones in it, under any plan.
        module_state_dict: of the original module, such as ``merge_state_dicts`` returns.
        optimizer: the optimizer that ``build_optimizer`` made of ``module``.
        optimizer_state_dict: merged, or the state dict of an optimizer over ``parameters()`` of the original module.
        device: of the loaded tensors, by default the device of this rank.

    Raises ``ValueError`` before anything is changed for names or shapes that do not fit, for several parameter groups,
    and for an optimizer without a state dict or the other way round.
    """
    check_optimizer(optimizer, optimizer_state_dict)
    local = _local_part(module, module_state_dict)
    state = None
    if optimizer is not None and optimizer_state_dict is not None:
        state = _divided_optimizer(module, optimizer, optimizer_state_dict)
    load_sharded_state_dict(module, local, optimizer, state, device=device)


load_merged_state_dicts = load_merged_state_dict


def load_sharded_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Load what ``state_dict()`` of this rank returned; not collective.

    ``device`` is the device of the loaded tensors, by default the one of this rank.

    Raises ``ValueError`` for the state of a different rank, and for an optimizer without a state dict or the other
    way round.
    """
    check_optimizer(optimizer, optimizer_state_dict)
    to_device(module, optimizer, device)
    module.load_state_dict(module_state_dict)
    if optimizer is not None and optimizer_state_dict is not None:
        optimizer.load_state_dict(dict(optimizer_state_dict))


def check_optimizer(optimizer: Optimizer | None, state_dict: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` for an optimizer without a state dict or the other way round."""
    if (optimizer is None) != (state_dict is None):
        raise ValueError("optimizer and optimizer_state_dict are given together or not at all")


def to_device(module: nn.Module, optimizer: Optimizer | None, device: str | torch.device | None) -> None:
    """Move ``module`` to ``device``, by default the device of this rank, if it is elsewhere.

    Raises ``ValueError`` for an optimizer with shards of its parameters, which would stay.
    """
    if device is None:
        if not parallel_state.model_parallel_is_initialized():
            return
        device = parallel_state.local_device()
    wanted = torch.empty(0, device=device).device
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.device == wanted for tensor in tensors):
        return
    if hasattr(optimizer, "shards"):
        raise ValueError(
            f"the module is on {tensors[0].device} with an optimizer that keeps shards of its parameters there: move "
            f"the module to {wanted} before build_optimizer."
        )
    module.to(wanted)


def wholes(pieces: Iterable[tuple[K, PlaceInWhole | None, int, Any]]) -> dict[K, Any]:
    """Return the whole value of each key, of its pieces on all ranks, which may repeat.

    A value that is not divided, such as a number, is returned itself.

    Args:
        pieces: for each its key, its place, the index of its first element in the flattened tensor of a rank, and its
            values: of the shape of the rank's tensor, or flattened.

    Raises ``ValueError`` for a key of which elements are missing.
    """
    found: dict[K, list[tuple[PlaceInWhole | None, int, Any]]] = {}
    for key, place, start, values in pieces:
        found.setdefault(key, []).append((place, start, values))
    return {key: _whole(key, each) for key, each in found.items()}


def _whole(key: object, pieces: Sequence[tuple[PlaceInWhole | None, int, Any]]) -> Any:
    place, _, first = pieces[0]
    if place is None or not isinstance(first, torch.Tensor) or first.shape == place.shape or not first.shape:
        return first
    whole, lacks = first.new_empty(place.shape), torch.ones(place.shape, dtype=torch.bool, device="cpu")
    for each, start, values in pieces:
        for block in each.blocks(values, start) if each else ():
            whole[block.region], lacks[block.region] = block.values, False
    if lacks.any():
        name = " of ".join(reversed(key)) if isinstance(key, tuple) else key
        raise ValueError(f"{name} lacks {counted(int(lacks.sum()), 'element')}: give the state dicts of all ranks")
    return whole


def _merged_module(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    extras = _extras(states[0])
    merged: dict[str, Any] = {}
    for key, value in states[0].items():
        if not key.endswith(EXTRA_STATE_KEY):
            if not key.startswith(tuple(extras)):
                merged[key] = value
            continue
        prefix, firsts = key.removesuffix(EXTRA_STATE_KEY), first_names(value)
        names = {f"{prefix}{name}": firsts.get(name, name) for name in value["state_names"]}
        whole = wholes(
            (first, _place(state[key], name.removeprefix(prefix)), 0, state[name])
            for state in states
            for name, first in names.items()
            if name in state
        )
        missing = [name for name, first in names.items() if first not in whole]
        check_names("the merge of the given state dicts", missing, [], "Give those of all ranks.")
        merged |= {name: whole[first] for name, first in names.items()}
    return merged


def _place(extra: Mapping[str, Any], name: str) -> PlaceInWhole | None:
    """The place of a tensor; ``None`` for other values."""
    return place_in(extra["held"][name]) if name in extra["held"] else None


def _merged_optimizer(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict of one optimizer over the parameters of the original module, merged from those of all ranks."""
    extras = [state[EXTRA_STATE_KEY] for state in states]
    for state, extra in zip(states, extras, strict=True):
        if extra["names"] != extras[0]["names"]:
            raise ValueError(f"the optimizer of rank {extra['rank']} is over other parameters than that of rank 0")
        _check_one_group(state)
    held = {name for extra in extras for name in extra["own"]}
    names = [name for name in extras[0]["names"] if name in held]
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for (name, key), value in wholes(piece for state in states for piece in _pieces(state)).items():
        found[name][key] = _copied(value)
    masters = {name: values.pop(_MASTER) for name, values in found.items() if _MASTER in values}
    options = options_of(states[0]["param_groups"][0])
    whole: dict[str, Any] = {
        "state": {index: values for index, values in enumerate(found.values()) if values},
        "param_groups": [{**options, "params": list(range(len(names)))}],
    }
    if masters or names != extras[0]["names"]:
        whole[EXTRA_STATE_KEY] = {"version": VERSION, "merged": names, "masters": masters}
    return whole


def _pieces(state: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], PlaceInWhole, int, Any]]:
    """The values of a rank's state by their parameter and key; those of shards under ZeRO, and their master copies.

    Raises ``ValueError`` for a value that is neither a number nor of the shape of its parameter or shard.
    """
    extra = state[EXTRA_STATE_KEY]
    for number, values in state["state"].items():
        shard = state["shards"][number] if "shards" in state else {"parameter": number, "start": 0}
        name = extra["own"][shard["parameter"]]
        place = place_in(extra["held"][name])
        shape = (shard["stop"] - shard["start"],) if "stop" in shard and place.shape else place.local_shape
        master = state.get("masters", {}).get(number)
        for key, value in (values if master is None else {**values, _MASTER: master}).items():
            if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != shape:
                raise ValueError(
                    f"{key} of {name} has shape {list(value.shape)}, and the parameter {list(place.local_shape)}: "
                    f"only optimizers whose state has the shape of the parameter, as that of Adam, can be merged"
                )
            yield (name, key), place, shard["start"], value


def _local_part(module: nn.Module, merged: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of ``merged``. Raises ``ValueError`` for names or shapes that do not fit the module."""
    extras = {prefix: each.nxdpp_extra_state() for prefix, each in parallel_modules(module).items()}
    if not extras:
        raise ValueError(f"{type(module).__name__} has no parallel module in it: call its own load_state_dict")
    own = [key for key in module.state_dict(keep_vars=True) if not key.endswith(EXTRA_STATE_KEY)]
    expected = {key for key in own if not key.startswith(tuple(extras))}
    places: dict[str, PlaceInWhole] = {}
    for prefix, extra in extras.items():
        expected |= {f"{prefix}{name}" for name in extra["state_names"]}
        places |= {f"{prefix}{name}": place_in(held) for name, held in extra["held"].items()}
    missing, unknown = sorted(expected - merged.keys()), sorted(merged.keys() - expected)
    remedy = "Give what merge_state_dicts returned, or the original's state_dict()."
    check_names("the merged state dict", missing, unknown, remedy)
    return {key: _part(key, merged[key], places[key]) if key in places else merged[key] for key in own}


def _divided_optimizer(module: nn.Module, optimizer: Optimizer, merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a ``merged`` state, or of the original optimizer's, that ``optimizer`` of this rank loads.

    Raises ``ValueError`` for the state of different parameters, and for several parameter groups.
    """
    own = add_optimizer_extra_state(module, optimizer, dict(optimizer.state_dict()))
    extra, saved = own.pop(EXTRA_STATE_KEY), merged.get(EXTRA_STATE_KEY)
    for each in (merged, own):
        _check_one_group(each)
    names, masters = extra["names"], {}
    if saved is not None:
        check_version(saved)
        if "merged" not in saved:
            raise ValueError("the optimizer's state is that of one rank: give what merge_state_dicts returned")
        names, masters = saved["merged"], saved["masters"]
    count = len(merged["param_groups"][0]["params"])
    missing = sorted({*extra["own"]} - {*names})
    if len(names) != count or missing:
        raise ValueError(
            f"the optimizer's state is that of {counted(count, 'parameter')}, and the module has {len(names)}, or "
            f"others ({missing[:1]}): give the state of an optimizer over the same module"
        )
    states = {name: merged["state"].get(index, {}) for index, name in enumerate(names)}
    own["param_groups"] = [{**own["param_groups"][0], **options_of(merged["param_groups"][0])}]
    own["state"], is_sharded = {}, "shards" in own
    if is_sharded:
        own["masters"] = {}
    pieces = own["shards"] if is_sharded else [{"parameter": number} for number in range(len(extra["own"]))]
    for number, piece in enumerate(pieces):
        name = extra["own"][piece["parameter"]]
        place = place_in(extra["held"][name])
        # A parameter without dimensions is not flattened.
        span = (piece["start"], piece["stop"]) if is_sharded and place.shape else (0, None)
        if states[name]:
            own["state"][number] = {
                key: _copied(value if _is_number(value, place) else _part(f"{key} of {name}", value, place, *span))
                for key, value in states[name].items()
            }
        if is_sharded and name in masters:
            own["masters"][number] = _copied(_part(name, masters[name], place, *span))
    return own


def _is_number(value: Any, place: PlaceInWhole) -> bool:
    return not isinstance(value, torch.Tensor) or (value.numel() == 1 and value.shape != place.shape)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _part(name: str, value: Any, place: PlaceInWhole, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """The elements of the whole ``value`` that a rank or its shard has. Raises ``ValueError`` for another shape."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != place.shape:
        given = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name} has {given} in the merged state dict, and shape {list(place.shape)} here")
    return place.part_of(value, start, stop)


def _extras(state: Mapping[str, Any]) -> dict[str, Any]:
    """The extra states in ``state`` by the prefix of their parallel module."""
    return {key.removesuffix(EXTRA_STATE_KEY): extra for key, extra in state.items() if key.endswith(EXTRA_STATE_KEY)}


def _rank_of(state: Mapping[str, Any]) -> int:
    return int(next(iter(_extras(state).values()))["rank"])


def _job_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix: [extra[key] for key in _OF_A_JOB] for prefix, extra in _extras(state).items()}


def _check_ranks(what: str, given: Sequence[int], ranks: int) -> None:
    if not ranks or [*given] != [*range(ranks)]:
        raise ValueError(
            f"the {what} are those of ranks {[*given]}, and the job had {counted(ranks, 'rank')}: give one for each"
        )


def _check_one_group(state: Mapping[str, Any]) -> None:
    count = len(state["param_groups"])
    if count != 1:
        raise ValueError(f"the optimizer has {count} parameter groups, and the state of one group can be merged")
