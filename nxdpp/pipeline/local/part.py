"""The part of a model that one rank holds: its tensors and modules, and how they change between steps.

::

    constructor    whole model ─ free what other ranks hold ─▶ tree ─ ties, initial weights, values to compare
    a step asks    ChangeRecord.look() ─ has moved ─▶ hooks, wrappers, replaced modules, ties, materialised, dtypes
    follow         after a move, a load or a replacement: whole model, ties and all that was made of the part
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.exchange import check_replica_values
from nxdpp.agreement.same_values import RankValues
from nxdpp.counted import counted
from nxdpp.gradients.autocast import note_blocks_that_are_off
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.optimizer.partial_steps import refuse_partial_steps
from nxdpp.gradients.partial_norms import refuse_partial_norms
from nxdpp.gradients.replaced_parameters import (
    check_no_optimizer_has,
    check_no_optimizer_holds,
    note_present,
    warn_of_replaced,
    watch_replaced,
)
from nxdpp.gradients.shards.rank_shards import RankShards
from nxdpp.initialization.allocation import allocate
from nxdpp.initialization.initialisers import ParameterInitialiser
from nxdpp.pipeline import arguments
from nxdpp.pipeline.local import half_loaded, tree
from nxdpp.pipeline.local.changes import ENTRIES, TENSORS, Change, ChangeRecord, parameters_of_all_models
from nxdpp.pipeline.local.compared_values import ComparedValues
from nxdpp.pipeline.local.elsewhere_tensors import refuse_calls_elsewhere, take_back
from nxdpp.pipeline.local.initial_values import InitialValues, registries
from nxdpp.pipeline.local.loading import check_state, load_assigning, of_this_rank, without_values
from nxdpp.pipeline.local.own_save import refuse_own_save
from nxdpp.pipeline.local.positional_wrappers import follow_wrapped
from nxdpp.pipeline.local.refused_models import refuse_local_wrappers
from nxdpp.pipeline.local.refused_steps import refuse_wrong_steps
from nxdpp.pipeline.local.replaced_modules import ReplacementSync
from nxdpp.pipeline.local.spine_hooks import SpineHooks, warn_of_traced_hooks
from nxdpp.pipeline.local.tied_weights import TiedWeight, TiedWeights
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.partition.assignment import Owners
from nxdpp.pipeline.torch_checkpoints import follow_checkpoints
from nxdpp.ranks import parallel_state
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tracing.modules import listings


class Follower(Protocol):
    """Graphs, programs and engines of a part, which follow its changes."""

    def replace(self, replaced: Mapping[str, nn.Module]) -> None:
        """Run the modules that were replaced, by name."""

    def forget(self) -> None:
        """Forget what was made of the part before a change: graphs, programs, engines."""

    def verify_again(self) -> None:
        """Have the ranks compare the parameters again."""


class Part:
    """The part of ``root`` that ``rank`` holds; the constructor frees the rest.

    Args:
        root: the whole model.
        owners: the ranks that hold each parameter.
        rank: pipeline rank of this process.
        layers: names of the transformer layers.
        param_init_fn: initialises a module; see ``NxDPPModel``.
        changes: the record that follows the part; by default one of its own.
        stages: the stages that hold each parameter, where a rank may have several.

    Attributes:
        root: the whole model; parameters of other ranks are on the meta device.
        rank: pipeline rank of this process.
        module: the tree of local modules, under their original names.
        tied: the weights that other ranks hold, too.
        any_ties: ``True`` if any rank of the pipeline has such weights.
        aliases: the names, in the whole model, of each parameter and each buffer that has several.
        initial: the initial weights of tensors on the meta device.
        compared: the values and attributes that other ranks compare with theirs.
        changes: of the part and of the modules above the layers.
        shards: the units of its parameters; ``None`` where they are whole.
        follower: of its changes; ``None`` for a part that runs no steps.
        ready_at: number of the change at which the part was made ready; a step after another change makes it again.
    """

    def __init__(
        self,
        root: nn.Module,
        owners: Owners,
        rank: int,
        layers: Sequence[str],
        param_init_fn: ParameterInitialiser | None = None,
        changes: ChangeRecord | None = None,
        stages: Owners | None = None,
    ) -> None:
        used = tree.local_names(owners, rank)
        self._owners = owners = tree.with_tied_names(root, owners)
        local, elsewhere = tree.local_names(owners, rank), tree.names_elsewhere(owners, rank)
        tree.check_not_freed(root, local)
        take_back(root)
        self.root, self.rank, self._layers = root, rank, layers
        self.follower: Follower | None = None
        self.shards: RankShards | None = None
        # Names that share a tensor are found while the model is whole: freeing replaces tensors.
        self.initial = InitialValues(root, param_init_fn)
        self.compared = ComparedValues(root, local, rank)
        self.aliases = tree.shared_names(root)
        tied = tree.tied_names(root, owners)
        over_ranks = [names for names, _ in tied]
        over_stages = [names for names, _ in tree.tied_names(root, stages or owners) if names not in over_ranks]
        whole = dict(listings.named_parameters(root))
        tree.free_others(root, local, elsewhere)
        if elsewhere:
            refuse_own_save(root)
        self.module = tree.build_local_module(root, local, layers, elsewhere)
        refuse_calls_elsewhere(root, owners, self.module)
        kept = set(map(id, listings.parameters(self.module)))
        others = {name: parameter for name, parameter in whole.items() if id(parameter) not in kept}
        watch_replaced(others)
        # Only what somebody else holds stays in it, such as an optimizer made before wrapping.
        self._others = WeakIdKeyDictionary()
        self._others.update((parameter, name) for name, parameter in others.items())
        # Numbers count the ties of the whole model, so that a number is the same weight on all ranks.
        weights = [
            TiedWeight(next(name for name in names if name in used), tuple(names), tuple(ranks), number)
            for number, (names, ranks) in enumerate(tied)
            if rank in ranks
        ]
        of_stages = [names[0] for names in over_stages if names[0] in local]
        # Tied weights that this rank holds under another name, for its stages.
        named_only = local - used
        self.tied = TiedWeights(self.module, weights, rank, named_only, of_stages)
        self.any_ties = bool(tied)
        self.initial.keep(self.module)
        self.compared.keep(self.module)
        self._hooks = SpineHooks(root, self.module, layers)
        self._sync = ReplacementSync(self.module, root, named_only)
        self._watch(changes or ChangeRecord())
        _refuse_what_needs_the_whole()

    def _watch(self, changes: ChangeRecord) -> None:
        self.changes = changes
        changes.follow(self.module, self._hooks.modules, self.root)
        self._runs = 0
        self._has_checked_optimizers = False
        self.ready_at = self._trained_at = 0
        self._entries = changes.watch(*ENTRIES)
        self._hook_changes = changes.watch(Change.HOOK)
        self._wrappers = changes.watch(*TENSORS, Change.HOOK)
        self._materialised = changes.watch(*TENSORS)
        self._dtypes = changes.watch(*TENSORS, Change.GRADIENT)
        self._values = changes.watch(Change.VALUES)
        self._is_following = False
        self._note_names()
        self.module.run_before_listings(self._follow_before_listing)

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters; without parameters, the rank's own."""
        return self.changes.device

    def make_ready(self) -> None:
        """Make the part ready for a step. Raises ``RuntimeError`` for modules and tensors that no step can use."""
        self.check_modules()
        if self._materialised.has_moved:
            self.check_materialised()
            half_loaded.check_whole(self.module)
            self._materialised.settle()
        self.ready_at = self.changes.number

    def check_modules(self) -> None:
        """Follow what has changed since the last step. Raises ``RuntimeError`` for what no step can use."""
        self.changes.look()
        if self._hook_changes.has_moved:
            self._hooks.check(self.changes.with_changed_hooks())
            self._hook_changes.settle()
        if self._wrappers.has_moved:
            refuse_local_wrappers(self.module)
            self._wrappers.settle()
        if self._entries.has_moved:
            self._follow_replacements()

    def check_materialised(self) -> None:
        """Raise ``RuntimeError`` for parameters or buffers without values."""
        without = self.initial.names_on_meta()
        if without:
            raise RuntimeError(
                f"rank {self.rank} has {counted(len(without), 'parameter or buffer', 'parameters or buffers')} on the "
                f"meta device without values ({without[0]} is the first). Call move_model_to_device() or "
                "materialise(), which initialise them, or nxdpp.load_pretrained(model, directory); and make the "
                "optimizer after it."
            )

    def check_trained(self) -> None:
        """Raise ``RuntimeError`` for a dtype that cannot be trained, and for optimizers made before wrapping."""
        if self._trained_at != self.changes.number:
            if not self._has_checked_optimizers:
                self.check_optimizers()
                self._has_checked_optimizers = True
            if self._dtypes.has_moved:
                arguments.check_trained_dtypes(self.module)
                self._dtypes.settle()
            self._trained_at = self.changes.number

    def check_optimizers(self) -> None:
        """Raise ``RuntimeError`` for an optimizer made before wrapping, which holds parameters of other ranks."""
        check_no_optimizer_has({name: parameter for parameter, name in self._others.items()})

    def unverified_values(self) -> RankValues | None:
        """Return the values that the ranks have to compare; ``None`` where they have compared them.

        They compare copies of tied weights, which a script may change on one rank, in runs 1, 2, 4, 8 and so on too.
        """
        run = self._runs + 1
        is_asked = self._values.has_moved or (self.any_ties and not run & run - 1)
        return self.compared.present(self.tied) if is_asked else None

    def note_verified(self) -> None:
        """Note that a step runs, in which the ranks have compared the values."""
        self._runs += 1
        if self._values.has_moved:
            self._values.settle()
            self.compared.forget()

    def follow(self) -> None:
        """Follow tensors and modules that were moved, loaded or replaced, in the tree or in the whole model.

        Raises:
            RuntimeError: for a replacement with which the stages cannot run, see ``ReplacementSync`` and
                ``TiedWeights``. Also for modules in wrappers.
        """
        self._replace_in_both()
        self._forget()
        refuse_local_wrappers(self.module)
        if self.changes.take_hooks():
            warn_of_traced_hooks(self.root, self._layers)
        # A program may wrap a layer between a move and the step.
        self.changes.note(Change.MOVE, Change.HOOK, Change.VALUES)
        self.changes.look()
        self._entries.settle()
        self._note_names()

    def _follow_before_listing(self) -> None:
        """Follow replacements, so that an optimizer gets the parameters that will run."""
        if self._is_following or (self.shards is not None and any(unit.is_whole for unit in self.shards.units)):
            return
        self._is_following = True
        try:
            self.changes.look()
            # The next step or refresh() knows of a replacement that only this rank has made, or under one name.
            is_of_step = bool(self._runs) and self._sync.has_replacement_in_tree()
            is_wrong = self._entries.has_moved and (
                self.tied.are_untied() or bool(tree.new_tie(self.root, self._owners))
            )
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
            self._forget()
            self.changes.note(Change.VALUES)
            self.changes.look()
        self._entries.settle()
        present = set(map(id, listings.parameters(self.module)))
        warn_of_replaced({name: known for known, name in self._names.items() if id(known) not in present})
        self._note_names()

    def _note_names(self) -> None:
        self._names = WeakIdKeyDictionary({each: name for name, each in listings.named_parameters(self.module)})
        note_present(self._names)

    def _replace_in_both(self) -> bool:
        """Make replacements in the tree and in the whole model; return whether a stage runs another module."""
        if names := tree.new_tie(self.root, self._owners):
            raise RuntimeError(
                f"{' and '.join(names)} have become one parameter, and different pipeline ranks hold them: each would "
                f"train a copy of its own. Tie them before the model is wrapped."
            )
        replaced, has_changed = self._sync.follow()
        if replaced:
            if self.follower is not None:
                self.follower.replace(replaced)
            follow_wrapped(self.root, {name: replaced[name] for name in self._layers if name in replaced})
            # Modules of other ranks that have taken another's place raise in a call too.
            refuse_calls_elsewhere(self.root, self._owners, self.module)
        self.tied.follow()
        return has_changed

    def _forget(self) -> None:
        if self.follower is not None:
            self.follower.forget()

    def _verify_again(self) -> None:
        if self.follower is not None:
            self.follower.verify_again()

    def refresh(self) -> None:
        """Follow all changes, and have the ranks compare the values; every rank calls it."""
        self.follow()
        self._verify_again()

    def materialise(self) -> None:
        """Give initial weights to all that is on the meta device; not collective.

        Raises:
            RuntimeError: for a tensor that nothing initialises, and for an optimizer that holds a parameter on the meta
                device. Nothing is changed then.
        """
        places = self.initial.places()
        if not places:
            return
        replaced = {place.name: place.tensor for place in places if isinstance(place.tensor, nn.Parameter)}
        check_no_optimizer_holds(replaced, "Make the optimizer after move_model_to_device().")
        self.replace_tensors([place.tensor for place in places], self.initial.of_places(places))
        watch_replaced(replaced)
        self.follow()

    def move_to(self, device: torch.device, transport: Callable[[torch.device], Transport]) -> None:
        """Materialise the part, move it to ``device``, and make the copies of each tied weight equal; on all ranks.

        Raises:
            RuntimeError: where copies have different shapes or dtypes, or replicas different values.
        """
        self.materialise()
        move_model_to_device(self.module, device)
        self.follow()
        if parallel_state.is_debug():
            return
        if self.any_ties:
            self.tied.make_equal(transport(self.device), parallel_state.get_pipeline_control_group())
        # Experts of other ranks are compared in the first step.
        alike = [(name, each) for name, each in listings.named_parameters(self.module) if not is_of_experts(each)]
        check_replica_values(alike, self.initial.origin)

    def shard(self, shards: RankShards) -> None:
        """Hold ``shards``, which the parameters have become, on this rank's device; on all ranks."""
        self.shards = shards
        self.changes.note(Change.PARAMETER)
        self.follow()
        self.materialise()
        move_model_to_device(self.module, parallel_state.local_device())
        self.follow()

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Return a context with sharded parameters whole; collective over the replicas where they are sharded."""
        return nullcontext() if self.shards is None else self.shards.whole()

    def load(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as ``Module.load_state_dict`` does; with ``assign``, attributes of parameters and ties are kept.

        Tensors of ``state_dict`` that only other ranks hold are left out. Tensors on the meta device get memory if
        ``state_dict`` has values for them. Of a whole tensor in the place of a shard the rank takes its rows.

        Raises:
            RuntimeError: for names or shapes that do not match, and for an optimizer that holds a parameter to be
                replaced; nothing is replaced then.
        """
        local = of_this_rank(state_dict, self.module, self.root, self.tied.names)
        check_state(self.module, local, strict)
        result = load_assigning(self.module, local, strict) if assign else self._load_in_place(local, strict)
        self.compared.note_loaded(local)
        if strict:
            half_loaded.clear(self.module)
        self._verify_again()
        self.follow()
        return result

    def _load_in_place(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        old = without_values(self.module, state_dict)
        new = list(map(allocate, old))
        self._replace(old, new)
        try:
            return self.module.load_state_dict(state_dict, strict=strict)
        except BaseException:
            self.replace_tensors(new, old)
            raise

    def end_load(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put the second tensor of each pair wherever the first one is, at the end of a load of ``load_pretrained``.

        Raises:
            RuntimeError: for an optimizer that holds a parameter to be replaced; nothing is changed then.
        """
        self._replace([old for old, _ in replaced], [new for _, new in replaced])
        self.compared.loads += 1
        self._verify_again()
        # The next step compares the values, and finds a rank that has not loaded.
        self.follow()

    def _replace(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        if not old:
            return
        ids = set(map(id, old))
        replaced = {name: each for name, each in listings.named_parameters(self.module) if id(each) in ids}
        check_no_optimizer_holds(replaced, "Make the optimizer after loading and after move_model_to_device().")
        self.replace_tensors(old, new)
        watch_replaced(replaced)

    def replace_tensors(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Put each tensor of ``new`` wherever the tensor of ``old`` at the same index is, in tree and whole model."""
        replacements = {id(before): after for before, after in zip(old, new, strict=True)}
        for module in {*listings.modules(self.module), *listings.modules(self.root)}:
            for registry in registries(module):
                for key, tensor in registry.items():
                    if id(tensor) in replacements:
                        registry[key] = replacements[id(tensor)]


def _refuse_what_needs_the_whole() -> None:
    """Watch torch's calls that would see only this rank's part of a model."""
    refuse_partial_norms(parameters_of_all_models)
    refuse_partial_steps(parameters_of_all_models)
    note_blocks_that_are_off()
    refuse_wrong_steps()
    follow_checkpoints()
