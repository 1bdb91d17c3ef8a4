"""Loads of a state dict into the part of a model that a rank holds."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.ground.torch_names import PARAMETERS, STATE_VERSIONS
from nxdpp.pipeline.local.own_save import state_of_all_names
from nxdpp.tensor.move_model_to_device import keep_attributes
from nxdpp.tensor.shards import with_rows_of
from nxdpp.tracing.modules import listings


def of_this_rank(
    state_dict: Mapping[str, Any], tree: nn.Module, root: nn.Module, tied: Sequence[Sequence[str]]
) -> Mapping[str, Any]:
    """Return ``state_dict`` for ``tree``: without the tensors that only other ranks hold, of shards this rank's rows.

    Of weights with several names, ``tied``, a file of Hugging Face has one, and so has ``named_parameters``.
    """
    own = tree.state_dict()
    elsewhere = set(state_of_all_names(root)) - own.keys()
    local = OrderedDict(
        (name, _as_own(value, own.get(name))) for name, value in state_dict.items() if name not in elsewhere
    )
    for names in tied:
        for given in [name for name in names if name in local][:1]:
            local = OrderedDict(dict.fromkeys(own.keys() & set(names), local[given])) | local
    if STATE_VERSIONS.held_by(state_dict):
        STATE_VERSIONS.set(local, STATE_VERSIONS.of(state_dict))
    return local


def load_assigning(tree: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Put the tensors of ``state_dict`` in the places of the parameters, whose attributes and ties are kept.

    Raises ``RuntimeError`` for an optimizer that holds a parameter to be replaced; nothing is replaced then.
    """
    stored = _stored_names(tree)
    before = dict(listings.named_parameters(tree, remove_duplicate=False))
    replaced = {name: old for name, old in before.items() if state_dict.get(stored[name], old) is not old}
    check_no_optimizer_holds(replaced, "Make the optimizer after load_state_dict(assign=True).")
    result = tree.load_state_dict(state_dict, strict=strict, assign=True)
    first: dict[int, nn.Parameter] = {}
    for name, old in replaced.items():
        owner, _, key = name.rpartition(".")
        new = first.setdefault(id(old), tree.get_parameter(name))
        PARAMETERS.of(tree.get_submodule(owner))[key] = new
        if not isinstance(state_dict[stored[name]], nn.Parameter):
            keep_attributes(old, new)
    watch_replaced(replaced)
    return result


def without_values(tree: nn.Module, state_dict: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of ``tree`` on the meta device for which ``state_dict`` has values, each once."""
    own = tree.state_dict(keep_vars=True)
    given = (tensor for name, tensor in own.items() if name in state_dict)
    return list({id(each): each for each in given if isinstance(each, torch.Tensor) and each.is_meta}.values())


def works_on_meta(function: Callable[[torch.Tensor], Any]) -> bool:
    """Return whether ``function``, which ``Module.to`` or ``half`` applies to tensors, runs on the meta device."""
    try:
        function(torch.empty(0, device="meta"))
    except NotImplementedError:
        return False
    return True


def _stored_names(tree: nn.Module) -> dict[str, str]:
    """The name in ``tree``'s state dict of each parameter; a wrapper such as ``CheckpointWrapper`` gives another."""
    stored: dict[int, deque[str]] = {}
    for name, value in tree.state_dict(keep_vars=True).items():
        stored.setdefault(id(value), deque()).append(name)
    parameters = listings.named_parameters(tree, remove_duplicate=False)
    return {
        name: stored[id(parameter)].popleft() if id(parameter) in stored else name for name, parameter in parameters
    }


def _as_own(value: Any, own: Any) -> Any:
    """``value`` of a state dict, or its rows where ``own`` is a shard."""
    if not isinstance(value, torch.Tensor) or not is_sharded(own) or is_sharded(value) or value.shape != own.shape:
        return value
    return with_rows_of(value, own)
