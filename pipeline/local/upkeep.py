"""Changes of a rank's part of the model between steps: weights, devices, modules; and what a step asks before it runs.

::

    ChangeRecord.look() ─ has moved ─▶ hooks, wrappers, replaced modules, ties, materialised, dtypes, values
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.replicas import check_replica_values
from nxdpp.agreement.same_values import RankValues
from nxdpp.gradients.replaced_parameters import (
    check_no_optimizer_holds,
    note_present,
    warn_of_replaced,
    watch_replaced,
)
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.ground.torch_names import PARAMETERS, STATE_VERSIONS
from nxdpp.initialization.allocation import allocate
from nxdpp.pipeline import arguments
from nxdpp.pipeline.local import half_loaded
from nxdpp.pipeline.local.changes import ENTRIES, TENSORS, Change
from nxdpp.pipeline.local.other_wrappers import refuse_local_wrappers
from nxdpp.pipeline.local.own_save import state_of_all_names
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.positional_wrappers import follow_wrapped
from nxdpp.pipeline.local.replaced_modules import ReplacementSync
from nxdpp.pipeline.local.spine_hooks import warn_of_traced_hooks
from nxdpp.pipeline.local.state_check import check_state
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.ranks import parallel_state
from nxdpp.tensor.move_model_to_device import checked_device, keep_attributes, move_model_to_device
from nxdpp.tensor.shards import with_rows_of
from nxdpp.tracing.modules import listings


class LocalUpkeep:
    """Changes of this rank's ``part``; the whole model, tied weights and everything made of the part follow them.

    Args:
        part: of this rank.
        layers: names of the transformer layers.
        on_replaced: called with the modules that were replaced, by name.
        on_change: called after a change that graphs, programs and engines do not have yet.
        on_new_values: called when the ranks have to compare their parameters again.
        has_gathered: whether gathered parameters are in the places of sharded ones now.

    Attributes:
        ready_at: number of the change at which the part was made ready; a step after another change makes it again.
    """

    def __init__(
        self,
        part: LocalPart,
        layers: Sequence[str],
        on_replaced: Callable[[Mapping[str, nn.Module]], None],
        on_change: Callable[[], None],
        on_new_values: Callable[[], None],
        has_gathered: Callable[[], bool] = lambda: False,
    ) -> None:
        self._part = part
        self._tree = part.module
        self._layers = layers
        self._sync = ReplacementSync(part.module, part.root, part.named_only)
        self._on_replaced = on_replaced
        self._on_change = on_change
        self._on_new_values = on_new_values
        self._has_gathered = has_gathered
        self._runs = 0
        self._has_checked_optimizers = False
        self._changes = part.changes
        self.ready_at = self._trained_at = 0
        self._entries = self._changes.watch(*ENTRIES)
        self._hooks = self._changes.watch(Change.HOOK)
        self._wrappers = self._changes.watch(*TENSORS, Change.HOOK)
        self._materialised = self._changes.watch(*TENSORS)
        self._dtypes = self._changes.watch(*TENSORS, Change.GRADIENT)
        self._values = self._changes.watch(Change.VALUES)
        self._is_following = False
        self._names = WeakIdKeyDictionary()
        self._note_names()
        part.module.run_before_listings(self._follow_before_listing)

    def make_ready(self) -> None:
        """Make the part ready for a step. Raises ``RuntimeError`` for modules and tensors that no step can use."""
        self.check_modules()
        if self._materialised.has_moved:
            self._part.check_materialised()
            half_loaded.check_whole(self._tree)
            self._materialised.settle()
        self.ready_at = self._changes.number

    def check_modules(self) -> None:
        """Follow what has changed since the last step. Raises ``RuntimeError`` for what no step can use."""
        self._changes.look()
        if self._hooks.has_moved:
            self._part.hooks.check(self._changes.with_changed_hooks())
            self._hooks.settle()
        if self._wrappers.has_moved:
            refuse_local_wrappers(self._tree)
            self._wrappers.settle()
        if self._entries.has_moved:
            self._follow_replacements()

    def check_trained(self) -> None:
        """Raise ``RuntimeError`` for a dtype that cannot be trained, and for optimizers made before wrapping."""
        if self._trained_at != self._changes.number:
            if not self._has_checked_optimizers:
                self._part.check_optimizers()
                self._has_checked_optimizers = True
            if self._dtypes.has_moved:
                arguments.check_trained_dtypes(self._tree)
                self._dtypes.settle()
            self._trained_at = self._changes.number

    def unverified_values(self) -> RankValues | None:
        """Return the values that the ranks have to compare; ``None`` where they have compared them.

        They compare copies of tied weights, which a script may change on one rank, in runs 1, 2, 4, 8 and so on too.
        """
        run = self._runs + 1
        return self._part.values() if self._values.has_moved or (self._part.any_ties and not run & run - 1) else None

    def note_verified(self) -> None:
        """Note that a step runs, in which the ranks have compared the values."""
        self._runs += 1
        if self._values.has_moved:
            self._values.settle()
            self._part.forget_initial_weights()

    def follow(self) -> None:
        """Follow tensors and modules that were moved, loaded or replaced, in the tree or in the whole model.

        Raises:
            RuntimeError: for a replacement with which the stages cannot run, see ``ReplacementSync`` and
                ``TiedWeights``. Also for modules in wrappers.
        """
        self._replace_in_both()
        self._on_change()
        refuse_local_wrappers(self._tree)
        if self._changes.take_hooks():
            warn_of_traced_hooks(self._part.root, self._layers)
        # A program may wrap a layer between a move and the step.
        self._changes.note(Change.MOVE, Change.HOOK, Change.VALUES)
        self._changes.look()
        self._entries.settle()
        self._note_names()

    def _follow_before_listing(self) -> None:
        """Follow replacements, so that an optimizer gets the parameters that will run."""
        if self._is_following or self._has_gathered():
            return
        self._is_following = True
        try:
            self._changes.look()
            # The next step or refresh() knows of a replacement that only this rank has made, or under one name.
            is_of_step = bool(self._runs) and self._sync.has_replacement_in_tree()
            is_wrong = self._entries.has_moved and (self._part.tied.are_untied() or bool(self._part.new_tie()))
            if self._entries.has_moved and not is_of_step and not is_wrong:
                self._follow_replacements()
        finally:
            self._is_following = False

    def _follow_replacements(self) -> None:
        """Follow replacements that none of our methods made."""
        if self._runs and self._sync.has_replacement_in_tree():
            raise RuntimeError(
                "modules of local_module were replaced after the first step: call refresh() on every rank, also on "
                "those that replaced none."
            )
        if self._replace_in_both():
            self._on_change()
            self._changes.note(Change.VALUES)
            self._changes.look()
        self._entries.settle()
        present = set(map(id, listings.parameters(self._tree)))
        warn_of_replaced({name: known for known, name in self._names.items() if id(known) not in present})
        self._note_names()

    def _note_names(self) -> None:
        self._names = WeakIdKeyDictionary({each: name for name, each in listings.named_parameters(self._tree)})
        note_present(self._names)

    def _replace_in_both(self) -> bool:
        """Make replacements in the tree and in the whole model; return whether a stage runs another module."""
        self._part.check_no_new_tie()
        replaced, has_changed = self._sync.follow()
        if replaced:
            self._on_replaced(replaced)
            follow_wrapped(self._part.root, {name: replaced[name] for name in self._layers if name in replaced})
            self._part.refuse_calls_elsewhere()
        self._part.tied.follow()
        return has_changed

    def materialise(self) -> None:
        """Give initial weights to the tensors on the meta device. Raises as ``LocalPart.materialise`` does."""
        if self._part.materialise():
            self.follow()

    def move_to(self, device: torch.device, transport: Callable[[torch.device], Transport]) -> None:
        """Materialise the part, move it to ``device``, and make the copies of each tied weight equal; on all ranks.

        Raises:
            RuntimeError: where copies have different shapes or dtypes, or replicas different values.
        """
        self.materialise()
        move_model_to_device(self._tree, device)
        self.follow()
        if parallel_state.is_debug():
            return
        if self._part.any_ties:
            self._part.tied.make_equal(transport(self._part.device), parallel_state.get_pipeline_control_group())
        check_replica_values(listings.named_parameters(self._tree), self._part.origin)

    def load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """Load as ``Module.load_state_dict`` does; with ``assign``, attributes of parameters and ties are kept.

        Tensors of ``state_dict`` that only other ranks hold are left out. Tensors on the meta device get memory if
        ``state_dict`` has values for them. Of a whole tensor in the place of a shard the rank takes its rows.

        Raises:
            RuntimeError: for names or shapes that do not match, and for an optimizer that holds a parameter to be
                replaced; nothing is replaced then.
        """
        local = self._local(state_dict)
        check_state(self._tree, local, strict)
        result = self._load_assigning(local, strict) if assign else self._load_in_place(local, strict)
        self._part.note_loaded(local)
        if strict:
            half_loaded.clear(self._tree)
        self._on_new_values()
        self.follow()
        return result

    def replace(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put the second tensor of each pair wherever the first one is, at the end of a load.

        Raises:
            RuntimeError: for an optimizer that holds a parameter to be replaced; nothing is changed then.
        """
        if replaced:
            self._replace(replaced)
        self._part.loads += 1
        self._on_new_values()
        # The next step compares the values, and finds a rank that has not loaded.
        self.follow()

    def check_device(self, device: torch.device | str | int | None) -> torch.device:
        """``device``, by default the rank's own. Raises ``ValueError`` for a missing device and for meta."""
        target = checked_device(parallel_state.local_device() if device is None else device)
        if target.type == "meta":
            raise ValueError("the meta device has no memory, and a move to it loses all values: give another device.")
        return target

    def _local(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``state_dict`` without the tensors that only other ranks hold."""
        own = self._tree.state_dict()
        elsewhere = set(state_of_all_names(self._part.root)) - own.keys()
        local = OrderedDict(
            (name, _as_own(value, own.get(name))) for name, value in state_dict.items() if name not in elsewhere
        )
        for names in self._part.tied.names:
            # A file of Hugging Face, and named_parameters(), have one name of a tied weight.
            for given in [name for name in names if name in local][:1]:
                local = OrderedDict(dict.fromkeys(own.keys() & set(names), local[given])) | local
        if STATE_VERSIONS.held_by(state_dict):
            STATE_VERSIONS.set(local, STATE_VERSIONS.of(state_dict))
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
            PARAMETERS.of(self._tree.get_submodule(owner))[key] = new
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
            self._replace(list(zip(old, new, strict=True)))
        try:
            return self._tree.load_state_dict(state_dict, strict=strict)
        except BaseException:
            self._part.replace_tensors(new, old)
            raise

    def _replace(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        old, new = zip(*tensors, strict=True)
        ids = set(map(id, old))
        replaced = {
            name: parameter for name, parameter in listings.named_parameters(self._tree) if id(parameter) in ids
        }
        check_no_optimizer_holds(replaced, "Make the optimizer after loading and after move_model_to_device().")
        self._part.replace_tensors(old, new)
        watch_replaced(replaced)


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


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
