"""What stays true of a rank's part of the model whatever is done to it: replaced, moved, loaded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.initialization.allocation import allocate
from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.move_model_to_device import checked_device, keep_attributes
from nxdpp.parallel_layers.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.pipeline.agreement.replicas import check_replica_values
from nxdpp.pipeline.local.part import LocalPart, replace_tensors
from nxdpp.pipeline.local.replaced_modules import TwoPlaces
from nxdpp.pipeline.local.tied_weights import TiedWeights
from nxdpp.pipeline.p2p.transport import Transport


class LocalUpkeep:
    """Keeps the whole model, the programs and the tied weights in step with this rank's tree.

    Args:
        part: what this rank holds.
        root: the whole model.
        tied: the weights of this rank that others hold, too.
        on_replaced: called with the modules that were replaced, by name.
    """

    def __init__(
        self,
        part: LocalPart,
        root: nn.Module,
        tied: TiedWeights,
        on_replaced: Callable[[Mapping[str, nn.Module]], None],
    ) -> None:
        self._part = part
        self._tree = part.module
        self._root = root
        self._places = TwoPlaces(part.module, root)
        self._tied = tied
        self._on_replaced = on_replaced

    def follow(self) -> None:
        """Take over what was replaced in the tree or in the whole model. Raises ``RuntimeError`` where that is not
        possible.
        """
        replaced = self._places.follow()
        if replaced:
            self._on_replaced(replaced)
        self._tied.follow()

    def load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """As ``Module.load_state_dict``; with ``assign``, attributes of parameters and ties survive.

        What is on the meta device gets memory for what it is given. Raises ``RuntimeError``, before anything is
        changed, where an optimizer holds a parameter that is replaced.
        """
        try:
            return self._load_assigning(state_dict, strict) if assign else self._load_in_place(state_dict, strict)
        except RuntimeError as error:
            elsewhere = (set(state_dict) & set(self._root.state_dict())) - set(self._tree.state_dict())
            if elsewhere:
                error.add_note(
                    f"{len(elsewhere)} of the {len(state_dict)} tensors given are of other stages: give this rank's "
                    f"alone, those that local_state_dict() names; or have nxdpp.load_pretrained(model, directory) read "
                    f"them from the files of the whole model."
                )
            raise

    def _load_assigning(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        before = dict(self._tree.named_parameters(remove_duplicate=False))
        replaced = {name: old for name, old in before.items() if state_dict.get(name, old) is not old}
        check_no_optimizer_holds(replaced, "Make the optimizer after load_state_dict(assign=True).")
        result = self._tree.load_state_dict(state_dict, strict=strict, assign=True)
        first: dict[int, nn.Parameter] = {}
        for name, old in replaced.items():
            owner, _, key = name.rpartition(".")
            new = first.setdefault(id(old), self._tree.get_parameter(name))
            self._tree.get_submodule(owner)._parameters[key] = new
            if not isinstance(state_dict[name], nn.Parameter):
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
            replace_tensors([self._tree, self._root], new, old)
            raise

    def replace(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put for each pair the second wherever the first one is.

        Raises ``RuntimeError``, before anything is changed, where an optimizer holds a parameter that is replaced.
        """
        old, new = zip(*tensors, strict=True)
        ids = set(map(id, old))
        replaced = {name: parameter for name, parameter in self._tree.named_parameters() if id(parameter) in ids}
        check_no_optimizer_holds(replaced, "Make the optimizer after loading and after move_model_to_device().")
        replace_tensors([self._tree, self._root], old, new)
        watch_replaced(replaced)

    def check_device(self, device: torch.device | str | int | None) -> torch.device:
        """``device``, by default the rank's own. Raises ``ValueError`` for one that is not there or holds no values."""
        target = checked_device(parallel_state.local_device() if device is None else device)
        if target.type == "meta":
            raise ValueError("the meta device has no memory, and what moves there loses its values: give another.")
        return target

    def make_equal(self, transport: Callable[[torch.device], Transport], device: torch.device) -> None:
        """Make copies equal that several ranks have of one weight; collective over the pipeline where there are any.

        Also compares data-parallel replicas, collectively over them, and raises ``RuntimeError`` where they differ.
        """
        if parallel_state.is_debug():
            return
        if self._part.any_ties:
            self._tied.make_equal(transport(device), parallel_state.get_pipeline_control_group())
        replicas = parallel_state.get_data_parallel_group()
        check_replica_values(self._tree.named_parameters(), self._part.origin, replicas)


def works_without_values(function: Callable[[torch.Tensor], Any]) -> bool:
    """Whether what ``Module.to``, ``cuda`` or ``half`` does to each tensor can be done on the meta device."""
    try:
        function(torch.empty(0, device="meta"))
    except NotImplementedError:
        return False
    return True


def _is_on_meta(value: Any) -> bool:
    """Whether ``value``, of a state dict, is a tensor without memory."""
    return isinstance(value, torch.Tensor) and value.is_meta
