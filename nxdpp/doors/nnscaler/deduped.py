"""Deduplicated state dicts: the first of several ranks with equal values keeps them, and sends them to the others.

::

                        unit 0, ranks 0 1     unit 1, ranks 2 3
    parallel modules    kept                  from unit 0, over the data group
    other modules       rank 0 keeps them     from rank 0
    shards of ZeRO      kept                  kept
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nxdpp.agreement.together import together
from nxdpp.doors.nnscaler.extra_state import (
    EXTRA_STATE_KEY,
    add_optimizer_extra_state,
    optimizer_extra_state,
    parallel_modules,
    take_extra_state,
    take_optimizer_extra_state,
)
from nxdpp.doors.nnscaler.merged import to_device
from nxdpp.doors.nnscaler.sent_values import send, send_state
from nxdpp.ranks import parallel_state


def deduped_state_dict(
    module: nn.Module, optimizer: Optimizer | None = None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return this rank's part of the state dicts of ``module`` and ``optimizer``, without what others keep.

    Not collective. The dicts of later units have only the description of their parts and their ZeRO shards. All ranks
    save their dicts: ``load_deduped_state_dict`` and ``merge_state_dicts`` need every one.

    Raises ``ValueError`` for a module without a parallel one.
    """
    prefixes = _parallel(module)
    state = {
        key: value
        for key, value in module.state_dict().items()
        if not isinstance(value, torch.Tensor) or _keeps(key, prefixes)
    }
    if optimizer is None:
        return state, None
    whole = optimizer.state_dict()
    if EXTRA_STATE_KEY not in whole:
        whole = add_optimizer_extra_state(module, optimizer, whole)
    if "shards" in whole:
        return state, whole
    names = whole[EXTRA_STATE_KEY]["own"]
    kept = {index: values for index, values in whole["state"].items() if _keeps(names[index], prefixes)}
    return state, {**whole, "state": kept}


deduped_state_dicts = deduped_state_dict


def load_deduped_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Load what ``deduped_state_dict`` of this rank returned, and the rest from the ranks that keep it.

    Collective over all ranks.

    Args:
        module, optimizer: made as before the save.
        module_state_dict, optimizer_state_dict: of this rank.
        device: of the loaded tensors, by default the device of this rank.

    Raises ``ValueError`` on all ranks, before anything is changed, for the dicts of a different rank or module, and for
    an optimizer without a state dict or the other way round.
    """

    def check() -> tuple[dict[str, Any], dict[str, Any] | None]:
        if (optimizer is None) != (optimizer_state_dict is None):
            raise ValueError("optimizer and optimizer_state_dict are given together or not at all")
        local = _filled(module, module_state_dict)
        if optimizer is None or optimizer_state_dict is None:
            return local, None
        return local, take_optimizer_extra_state(module, optimizer, optimizer_state_dict)

    local, state = together(check)
    to_device(module, optimizer, device)
    module.load_state_dict(local)
    prefixes = _parallel(module)
    for key, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            send(tensor, is_everywhere=not _is_parallel(key, prefixes))
    if optimizer is None or state is None:
        return
    if "shards" not in state:
        names = optimizer_extra_state(module, [each for group in optimizer.param_groups for each in group["params"]])
        received = {
            index: send_state(state["state"].get(index, {}), is_everywhere=not _is_parallel(name, prefixes))
            for index, name in enumerate(names["own"])
        }
        state["state"] = {index: values for index, values in received.items() if values}
    optimizer.load_state_dict(state)


def broadcast_weights(module: nn.Module, stride_size: int | None = None) -> None:
    """Give all units the parameters and buffers of the first ones; collective over all ranks.

    Rank ``r`` takes the values of rank ``r % stride_size``. Rank 0 gives the values of modules outside parallel
    ones. Buffers that a state dict leaves out are sent too.

    Args:
        module: a parallel module, or a module that has parallel ones in it.
        stride_size: number of ranks that have the values, a multiple of ``plan_ngpus``. By default ``plan_ngpus``.

    Raises, on all ranks and before anything is changed:
        ValueError: for a module without a parallel one, and a size that does not fit.
        RuntimeError: if one of the first ranks has no values.
    """

    def check() -> int:
        prefixes = _parallel(module)
        units = _units(prefixes, stride_size)
        if dist.get_rank() < units * _plan_ranks(prefixes):
            for each in parallel_modules(module).values():
                each.check_loaded()
        return units

    units = together(check)
    prefixes = _parallel(module)
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_outside = not _is_parallel(key, prefixes)
        send(tensor, is_everywhere=is_outside, sources=1 if is_outside else units)
    # Each module notes that it has values, and that its replicas are to be compared again.
    module.load_state_dict(module.state_dict())


def _parallel(module: nn.Module) -> dict[str, Any]:
    """The configuration of each parallel module in ``module`` by its prefix."""
    found = {prefix: each.compute_config for prefix, each in parallel_modules(module).items()}
    if not found:
        raise ValueError(f"{type(module).__name__} has no parallel module in it: use its own state_dict")
    return found


def _plan_ranks(prefixes: Mapping[str, Any]) -> int:
    ranks: int = next(iter(prefixes.values())).plan_ngpus
    return ranks


def _units(prefixes: Mapping[str, Any], stride_size: int | None) -> int:
    """The number of units that have the values."""
    size = _plan_ranks(prefixes)
    stride = size if stride_size is None else stride_size
    ranks = parallel_state.get_data_parallel_size() * size
    if not isinstance(stride, int) or stride <= 0 or stride % size or ranks % stride:
        raise ValueError(
            f"stride_size={stride!r} must be a multiple of plan_ngpus={size}, and divide the {ranks} ranks of the job"
        )
    return stride // size


def _is_parallel(name: str, prefixes: Mapping[str, Any]) -> bool:
    return any(name.startswith(prefix) for prefix in prefixes)


def _keeps(name: str, prefixes: Mapping[str, Any]) -> bool:
    """Return whether this rank is the one that keeps the tensor ``name``."""
    return dist.get_rank() < (_plan_ranks(prefixes) if _is_parallel(name, prefixes) else 1)


def _filled(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with this rank's present tensors in the place of tensors that other ranks keep."""
    prefixes, own = _parallel(module), module.state_dict()
    checked = dict(given)
    for prefix, each in parallel_modules(module).items():
        take_extra_state(checked, prefix, each.nxdpp_extra_state())
    own = {key: value for key, value in own.items() if not key.endswith(EXTRA_STATE_KEY)}
    missing = [key for key in own if key not in checked and _keeps(key, prefixes)]
    unknown = [key for key in checked if key not in own]
    if missing or unknown:
        raise ValueError(
            f"the state dict does not fit the module: it lacks {missing[:3]} of {len(missing)}, and has unknown "
            f"{unknown[:3]} of {len(unknown)}. Give what deduped_state_dict returned on this rank."
        )
    return {**own, **checked}
