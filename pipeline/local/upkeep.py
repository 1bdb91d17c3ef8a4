"""Upkeep of a rank's part of the model: follows replaced modules, loads state, moves between devices."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.initialization.allocation import allocate
from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.move_model_to_device import checked_device, keep_attributes
from nxdpp.parallel_layers.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.pipeline.agreement.replicas import check_replica_values
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.replaced_modules import ReplacementSync
from nxdpp.pipeline.local.state_check import check_state
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.tracing import listings


class LocalUpkeep:
    """Keeps the whole model and the tied weights in step with this rank's tree.

    Args:
        part: of this rank.
        on_replaced: called with the modules that were replaced, by name.
    """

    def __init__(self, part: LocalPart, on_replaced: Callable[[Mapping[str, nn.Module]], None]) -> None:
        self._part = part
        self._tree = part.module
        self._sync = ReplacementSync(part.module, part.root)
        self._on_replaced = on_replaced

    def follow(self) -> None:
        """Take over replacements in the tree or in the whole model.

        Raises:
            RuntimeError: for a replacement with which the stages cannot run, see ``ReplacementSync`` and
                ``TiedWeights``.
        """
        replaced = self._sync.follow()
        if replaced:
            self._on_replaced(replaced)
        self._part.tied.follow()

    def load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """Load as ``Module.load_state_dict`` does; with ``assign``, attributes of parameters and ties are kept.

        Tensors of ``state_dict`` that other ranks alone hold are left out. Tensors on the meta device get memory if
        ``state_dict`` has values for them.

        Raises:
            RuntimeError: for other names or shapes, and for an optimizer that holds a parameter to be replaced;
                nothing is replaced then.
        """
        local = self._local(state_dict)
        check_state(self._tree, local, strict)
        return self._load_assigning(local, strict) if assign else self._load_in_place(local, strict)

    def _local(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``state_dict`` without the tensors that other ranks alone hold."""
        elsewhere = set(self._part.root.state_dict()) - set(self._tree.state_dict())
        local = OrderedDict((name, value) for name, value in state_dict.items() if name not in elsewhere)
        if hasattr(state_dict, "_metadata"):
            # Versions of modules, which torch keeps beside the tensors.
            vars(local)["_metadata"] = state_dict._metadata
        return local

    def _load_assigning(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        stored = _stored_names(self._tree)
        before = dict(listings.named_parameters(self._tree, remove_duplicate=False))
        replaced = {name: old for name, old in before.items() if state_dict.get(stored[name], old) is not old}
        check_no_optimizer_holds(replaced, "Make the optimizer after load_state_dict(assign=True).")
        result = self._tree.load_state_dict(state_dict, strict=strict, assign=True)
        first: dict[int, nn.Parameter] = {}
        for name, old in replaced.items():
            owner, _, key = name.rpartition(".")
            new = first.setdefault(id(old), self._tree.get_parameter(name))
            self._tree.get_submodule(owner)._parameters[key] = new
            if not isinstance(state_dict[stored[name]], nn.Parameter):
                keep_attributes(old, new)
        watch_replaced(replaced)
        return result

    def _load_in_place(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        own = self._tree.state_dict(keep_vars=True)
        given = {name: tensor for name, tensor in own.items() if name in state_dict and _is_on_meta(tensor)}
        old = list({id(tensor): tensor for tensor in given.values()}.values())
        new = [allocate(tensor) for tensor in old]
        if old:
            self.replace(list(zip(old, new, strict=True)))
        try:
            return self._tree.load_state_dict(state_dict, strict=strict)
        except BaseException:
            self._part.replace_tensors(new, old)
            raise

    def replace(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """For each pair, put the second tensor wherever the first one is.

        Raises:
            RuntimeError: for an optimizer that holds a parameter to be replaced; nothing is changed then.
        """
        old, new = zip(*tensors, strict=True)
        ids = set(map(id, old))
        replaced = {
            name: parameter for name, parameter in listings.named_parameters(self._tree) if id(parameter) in ids
        }
        check_no_optimizer_holds(replaced, "Make the optimizer after loading and after move_model_to_device().")
        self._part.replace_tensors(old, new)
        watch_replaced(replaced)

    def check_device(self, device: torch.device | str | int | None) -> torch.device:
        """``device``, by default the rank's own. Raises ``ValueError`` for a missing device and for meta."""
        target = checked_device(parallel_state.local_device() if device is None else device)
        if target.type == "meta":
            raise ValueError("the meta device has no memory, and a move to it loses all values: give another device.")
        return target

    def make_equal(self, transport: Callable[[torch.device], Transport], device: torch.device) -> None:
        """Make the copies of each tied weight equal and compare data-parallel replicas; on all ranks.

        Raises:
            RuntimeError: where copies have different shapes or dtypes, or replicas different values.
        """
        if parallel_state.is_debug():
            return
        if self._part.any_ties:
            self._part.tied.make_equal(transport(device), parallel_state.get_pipeline_control_group())
        replicas = parallel_state.get_data_parallel_group()
        check_replica_values(listings.named_parameters(self._tree), self._part.origin, replicas)


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


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
