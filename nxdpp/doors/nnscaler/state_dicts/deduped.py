"""Deduplicated state dicts: the first of several ranks with equal values keeps them, and sends them to the others.

::

                        unit 0, ranks 0 1     unit 1, ranks 2 3
    parallel modules    kept                  from unit 0, over the data group
    other modules       rank 0 keeps them     from rank 0
    shards of ZeRO      kept                  kept, or from the first of several groups of units
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nxdpp.doors.nnscaler.state_dicts.extra_state import (
    EXTRA_STATE_KEY,
    add_optimizer_extra_state,
    check_names,
    parallel_modules,
    take_extra_state,
    take_optimizer_extra_state,
)
from nxdpp.doors.nnscaler.state_dicts.merged import check_optimizer, to_device
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.group_values import broadcast_value, from_rank_0

T = TypeVar("T")


def deduped_state_dict(
    module: nn.Module, optimizer: Optimizer | None = None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return this rank's part of the state dicts of ``module`` and ``optimizer``, without what others keep.

    Not collective. The dicts of later units have only the description of their parts and their ZeRO shards. All ranks
    save their dicts: ``load_deduped_state_dict`` and ``merge_state_dicts`` need every one.

    Raises ``ValueError`` for a module without a parallel one.
    """
    keepers = _Keepers(module)
    state: dict[str, Any] = module.state_dict()
    for key, value in list(state.items()):
        if isinstance(value, torch.Tensor) and not keepers.are_here(key):
            del state[key]
    if optimizer is None:
        return state, None
    whole = optimizer.state_dict()
    if EXTRA_STATE_KEY not in whole:
        whole = add_optimizer_extra_state(module, optimizer, whole)
    if "shards" in whole:
        is_kept = parallel_state.get_data_parallel_rank() < whole["data_parallel"]["size"]
        return state, whole if is_kept else {**whole, "state": {}, "masters": {}}
    names = whole[EXTRA_STATE_KEY]["own"]
    kept = {index: values for index, values in whole["state"].items() if keepers.are_here(names[index])}
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
        check_optimizer(optimizer, optimizer_state_dict)
        local = _filled(module, module_state_dict)
        if optimizer is None or optimizer_state_dict is None:
            return local, None
        return local, take_optimizer_extra_state(module, optimizer, optimizer_state_dict)

    local, state = Exchange().together(check)
    to_device(module, optimizer, device)
    module.load_state_dict(local)
    keepers = _Keepers(module)
    for key, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            _receive(tensor, keepers.is_only_rank_0(key))
    if optimizer is None or state is None:
        return
    if "shards" not in state:
        names = enumerate(add_optimizer_extra_state(module, optimizer, {})[EXTRA_STATE_KEY]["own"])
        received = (_of_first_units(state["state"].get(at, {}), keepers.is_only_rank_0(name)) for at, name in names)
        state["state"] = {index: values for index, values in enumerate(received) if values}
    elif (units := state["data_parallel"]["size"]) < parallel_state.get_data_parallel_size():
        state |= _of_first_units({key: state[key] for key in ("state", "masters")}, sources=units)
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
        plan_ngpus = _Keepers(module).plan_ngpus
        ranks = parallel_state.get_data_parallel_size() * plan_ngpus
        stride = plan_ngpus if stride_size is None else stride_size
        if not isinstance(stride, int) or stride <= 0 or stride % plan_ngpus or ranks % stride:
            raise ValueError(
                f"stride_size={stride!r} must be a multiple of plan_ngpus={plan_ngpus}, and divide the {ranks} ranks "
                f"of the job"
            )
        if dist.get_rank() < stride:
            for each in parallel_modules(module).values():
                each.check_loaded()
        return stride // plan_ngpus

    units, keepers = Exchange().together(check), _Keepers(module)
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_only_rank_0 = keepers.is_only_rank_0(key)
        _receive(tensor, is_only_rank_0, 1 if is_only_rank_0 else units)
    for each in parallel_modules(module).values():
        each.note_received()
    # The replicas are to be compared again.
    module.load_state_dict(module.state_dict())


def _of_first_units(value: T, is_everywhere: bool = False, sources: int = 1) -> T:
    """Return a copy of the ``value`` of a first unit, with tensors in host memory; collective over the data group.

    Args:
        value: of this rank.
        is_everywhere: all ranks take the value of rank 0; collective over all ranks.
        sources: number of units that have values. Unit ``u`` takes the value of unit ``u % sources``.
    """
    group = parallel_state.get_replica_control_group()
    if is_everywhere:
        return from_rank_0(value)
    if dist.get_world_size(group) == 1:
        return value
    place = parallel_state.get_data_parallel_rank() % sources
    received = value
    for source in range(sources):
        sent = broadcast_value(value, group, source)
        received = sent if source == place else received
    return received


def _receive(tensor: torch.Tensor, is_everywhere: bool, sources: int = 1) -> None:
    with torch.no_grad():
        tensor.copy_(_of_first_units(tensor.detach(), is_everywhere, sources))


class _Keepers:
    """The ranks that keep each tensor of ``module``: unit 0 keeps parallel modules, and rank 0 all other modules.

    Raises ``ValueError`` for a module without a parallel one.
    """

    def __init__(self, module: nn.Module) -> None:
        parallel = parallel_modules(module)
        if not parallel:
            raise ValueError(f"{type(module).__name__} has no parallel module in it: use its own state_dict")
        self._prefixes = tuple(parallel)
        self.plan_ngpus: int = next(iter(parallel.values())).compute_config.plan_ngpus

    def is_only_rank_0(self, name: str) -> bool:
        """Return whether the tensor ``name`` is outside of parallel modules."""
        return not name.startswith(self._prefixes)

    def are_here(self, name: str) -> bool:
        """Return whether this rank keeps the tensor ``name``."""
        return dist.get_rank() < (1 if self.is_only_rank_0(name) else self.plan_ngpus)


def _filled(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with this rank's present tensors in the place of tensors that other ranks keep."""
    keepers, own, checked = _Keepers(module), module.state_dict(), dict(given)
    for prefix, each in parallel_modules(module).items():
        take_extra_state(checked, prefix, each.nxdpp_extra_state())
    own = {key: value for key, value in own.items() if not key.endswith(EXTRA_STATE_KEY)}
    missing = [key for key in own if key not in checked and keepers.are_here(key)]
    unknown = [key for key in checked if key not in own]
    check_names("the state dict", missing, unknown, "Give what deduped_state_dict returned on this rank.")
    return {**own, **checked}
