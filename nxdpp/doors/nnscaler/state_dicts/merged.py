"""Merged state dicts: the ranks' parts joined into the state dict of the original module, for a load in any plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole
from nxdpp.counted import counted
from nxdpp.doors.nnscaler.state_dicts.extra_state import (
    EXTRA_STATE_KEY,
    check_names,
    check_version,
    joined,
    parallel_modules,
    placement_in,
)
from nxdpp.doors.nnscaler.state_dicts.merged_optimizer import divide_optimizer_state, merge_optimizers
from nxdpp.ranks import parallel_state


def merge_state_dicts(
    module_state_dicts: Sequence[Mapping[str, Any]],
    optimizer_state_dicts: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the state dicts of the original module and of an optimizer over its parameters; needs no ranks.

    The optimizer's state dict counts the parameters in the original module's order, so ``torch.optim.Adam`` over its
    ``parameters()`` loads it. Tensors that are not divided are the given objects.

    Args:
        module_state_dicts: of all ranks in any order, whole or deduplicated.
        optimizer_state_dicts: likewise, of optimizers that ``build_optimizer`` made.

    Raises:
        ValueError: for dicts that are not of exactly all ranks of one job, for state dicts without a parallel module,
            and for optimizers with several groups, or with state of a different shape than its parameter.
    """
    states = _of_all_ranks(module_state_dicts)
    merged = _merged_module(states)
    if optimizer_state_dicts is None:
        return merged, None
    optimizers = sorted(optimizer_state_dicts, key=lambda state: _extra_of_optimizer(state)["rank"])
    ranks = [state[EXTRA_STATE_KEY]["rank"] for state in optimizers]
    if ranks != list(range(len(states))):
        raise ValueError(
            f"the optimizer state dicts are those of ranks {ranks}, and the job has {counted(len(states), 'rank')}"
        )
    return merged, merge_optimizers(optimizers)


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
        state = divide_optimizer_state(module, optimizer, optimizer_state_dict)
    to_device(module, optimizer, device)
    module.load_state_dict(local)
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)


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


def _of_all_ranks(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """``states`` by rank. Raises ``ValueError`` unless each rank of a job has given one."""
    by_rank: dict[int, Mapping[str, Any]] = {}
    for state in states:
        extras = list(_extras(state).values())
        if not extras:
            raise ValueError(
                f"a state dict has no {EXTRA_STATE_KEY}: give what state_dict() or deduped_state_dict() of a parallel "
                f"module returned on each rank."
            )
        for extra in extras:
            check_version(extra)
        rank = extras[0]["rank"]
        if rank in by_rank:
            raise ValueError(f"two state dicts are those of rank {rank}: give one for each rank")
        by_rank[rank] = state
    ranks = {extra["compute_config"]["runtime_ngpus"] for state in states for extra in _extras(state).values()}
    if not ranks or ranks != {len(by_rank)} or max(by_rank) >= len(by_rank):
        raise ValueError(
            f"the state dicts are those of ranks {sorted(by_rank)}, and the job had {sorted(ranks)} ranks: give one "
            f"for each rank"
        )
    ordered = [by_rank[rank] for rank in range(len(by_rank))]
    for rank, state in enumerate(ordered):
        _check_same_module(rank, _extras(state), _extras(ordered[0]))
    return ordered


def _check_same_module(rank: int, extras: Mapping[str, Any], firsts: Mapping[str, Any]) -> None:
    for prefix in {*extras, *firsts}:
        here, there = extras.get(prefix, {}), firsts.get(prefix, {})
        for key in ("names", "state_names", "tied", "compute_config"):
            if here.get(key) != there.get(key):
                raise ValueError(
                    f"the state dicts of ranks 0 and {rank} are those of other modules or jobs: {key} differ for the "
                    f"parallel module {prefix.removesuffix('.') or 'itself'}"
                )


def _merged_module(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    extras = _extras(states[0])
    merged: dict[str, Any] = {}
    for key, value in states[0].items():
        if key.endswith(EXTRA_STATE_KEY):
            merged |= _merged_parallel(key.removesuffix(EXTRA_STATE_KEY), value, states)
        elif not key.startswith(tuple(extras)):
            merged[key] = value
    return merged


def _merged_parallel(prefix: str, extra: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors of the parallel module at ``prefix`` under all its names, in its order."""
    mates = {name: group for group in extra["tied"] for name in group}
    whole: dict[str, Any] = {}
    for name in extra["state_names"]:
        names = mates.get(name, [name])
        if names[0] not in whole:
            whole[names[0]] = _joined(prefix, names, states)
    return {f"{prefix}{name}": whole[mates.get(name, [name])[0]] for name in extra["state_names"]}


def _joined(prefix: str, names: Sequence[str], states: Sequence[Mapping[str, Any]]) -> Any:
    parts: list[tuple[PlaceInWhole, int, torch.Tensor]] = []
    for state in states:
        held = state[f"{prefix}{EXTRA_STATE_KEY}"]["held"]
        for name in names:
            value = state.get(f"{prefix}{name}")
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                return value
            parts.append((placement_in(held[name]), 0, value.detach()))
            break
    whole, lacking = joined(parts) if parts else (None, 0)
    if whole is None or lacking:
        raise ValueError(f"the state dicts lack {prefix}{names[0]} or a part of it: give those of all ranks")
    return whole


def _local_part(module: nn.Module, merged: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of ``merged``. Raises ``ValueError`` for names or shapes that do not fit the module."""
    extras = {prefix: each.nxdpp_extra_state() for prefix, each in parallel_modules(module).items()}
    if not extras:
        raise ValueError(f"{type(module).__name__} has no parallel module in it: call its own load_state_dict")
    own = [key for key in module.state_dict(keep_vars=True) if not key.endswith(EXTRA_STATE_KEY)]
    expected = {key for key in own if not key.startswith(tuple(extras))}
    placements: dict[str, PlaceInWhole] = {}
    for prefix, extra in extras.items():
        expected |= {f"{prefix}{name}" for name in extra["state_names"]}
        placements |= {f"{prefix}{name}": placement_in(held) for name, held in extra["held"].items()}
    missing, unknown = sorted(expected - merged.keys()), sorted(merged.keys() - expected)
    remedy = "Give what merge_state_dicts returned, or the original's state_dict()."
    check_names("the merged state dict", missing, unknown, remedy)
    return {key: _taken(key, merged[key], placements.get(key)) for key in own}


def _taken(key: str, value: Any, placement: PlaceInWhole | None) -> Any:
    if placement is None:
        return value
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != placement.shape:
        given = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{key} has {given} in the merged state dict, and shape {list(placement.shape)} here")
    return placement.part_of(value)


def _extras(state: Mapping[str, Any]) -> dict[str, Any]:
    """The extra states in ``state`` by the prefix of their parallel module."""
    return {key.removesuffix(EXTRA_STATE_KEY): extra for key, extra in state.items() if key.endswith(EXTRA_STATE_KEY)}


def _extra_of_optimizer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = state.get(EXTRA_STATE_KEY)
    if extra is None or "own" not in extra:
        raise ValueError(
            f"an optimizer's state dict has no {EXTRA_STATE_KEY} of a rank: make the optimizer with build_optimizer"
        )
    check_version(extra)
    return extra  # type: ignore[no-any-return]  # checked by its version
