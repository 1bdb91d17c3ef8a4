"""The part of a model that one rank holds, and the initial weights of its tensors on the meta device."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from nxdpp.agreement.configurations import configuration_lines
from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.plain_attributes import attribute_lines, plain_attributes
from nxdpp.agreement.same_values import InitialWeights, RankValues, sample
from nxdpp.counted import counted
from nxdpp.gradients.autocast import note_blocks_that_are_off
from nxdpp.gradients.optimizer.partial_steps import refuse_partial_steps
from nxdpp.gradients.partial_norms import refuse_partial_norms
from nxdpp.gradients.replaced_parameters import check_no_optimizer_has, check_no_optimizer_holds, watch_replaced
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.ground.torch_names import BUFFERS, PARAMETERS
from nxdpp.initialization.allocation import with_type_of
from nxdpp.initialization.initialisers import ParameterInitialiser
from nxdpp.initialization.materialise import MetaTensor, initial_weights
from nxdpp.initialization.parts import own_part, whole_of
from nxdpp.initialization.record import record_of
from nxdpp.pipeline.local.changes import ChangeRecord, parameters_of_all_models
from nxdpp.pipeline.local.elsewhere_calls import refuse_calls_elsewhere
from nxdpp.pipeline.local.elsewhere_tensors import take_back
from nxdpp.pipeline.local.equal_copies import TiedWeight
from nxdpp.pipeline.local.own_save import refuse_own_save
from nxdpp.pipeline.local.scaler_of_torch import refuse_scaler_of_torch
from nxdpp.pipeline.local.spine_hooks import SpineHooks
from nxdpp.pipeline.local.steps_in_backward import refuse_steps_in_backward
from nxdpp.pipeline.local.tied_weights import TiedWeights
from nxdpp.pipeline.local.tree import (
    build_local_module,
    check_not_freed,
    free_others,
    local_names,
    names_elsewhere,
    new_tie,
    shared_names,
    tied_names,
    with_tied_names,
)
from nxdpp.pipeline.partition.assignment import Owners
from nxdpp.pipeline.torch_checkpoints import follow_checkpoints
from nxdpp.tracing.modules import listings


class LocalPart:
    """The part of ``root`` that ``rank`` holds; the constructor frees the rest.

    Args:
        root: the whole model.
        owners: the ranks that hold each parameter.
        rank: pipeline rank of this process.
        layers: names of the transformer layers.
        seed: for the random numbers of parameters on the meta device.
        param_init_fn: initialises a module; see ``initial_weights``.
        changes: the record that follows the part; by default one of its own.
        stages: the stages that hold each parameter, where a rank may have several.

    Attributes:
        root: the whole model; parameters of other ranks are on the meta device.
        module: the tree of local modules, under their original names.
        tied: the weights that other ranks hold, too.
        named_only: names of tied weights that this rank holds under another name, for its stages.
        any_ties: ``True`` if any rank of the pipeline has such weights.
        aliases: the names, in the whole model, of each parameter and each buffer that has several.
        origin: the seed or generator state of the initial weights, as text; ``None`` where none were drawn. It must
            be equal on all ranks that have one.
        loads: how often ``load_pretrained`` has loaded weights.
        has_loaded_state: ``True`` after a state dict was loaded.
        loaded: a hash of the state dicts that were loaded into shards.
        attributes: plain attributes of all modules at construction, by path.
        changes: of the part and of the modules above the layers.
        hooks: of the modules above the layers, and of containers.
    """

    def __init__(
        self,
        root: nn.Module,
        owners: Owners,
        rank: int,
        layers: Collection[str],
        seed: int,
        param_init_fn: ParameterInitialiser | None,
        changes: ChangeRecord | None = None,
        stages: Owners | None = None,
    ) -> None:
        used = local_names(owners, rank)
        self._owners = owners = with_tied_names(root, owners)
        local, elsewhere = local_names(owners, rank), names_elsewhere(owners, rank)
        self.named_only = local - used
        check_not_freed(root, local)
        take_back(root)
        self.root = root
        self._rank = rank
        self.origin: str | None = None
        self.loads = 0
        self.has_loaded_state = False
        self.loaded = b""
        self._held_rows: dict[str, bytes] = {}
        self.attributes = plain_attributes(root)
        self._configuration = configuration_lines(root)
        self._seed = seed
        self._param_init_fn = param_init_fn
        self._record = record_of(root)
        # Names that share a tensor are found while the model is whole: freeing replaces tensors.
        first_names = _first_names(root)
        self.aliases = shared_names(root)
        tied = tied_names(root, owners)
        over_ranks = [names for names, _ in tied]
        over_stages = [names for names, _ in tied_names(root, stages or owners) if names not in over_ranks]
        whole = dict(listings.named_parameters(root))
        self._initial = InitialWeights(whole.items(), local)
        free_others(root, local, elsewhere)
        if elsewhere:
            refuse_own_save(root)
        self.module = build_local_module(root, local, layers, elsewhere)
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
        self.tied = TiedWeights(self.module, weights, rank, self.named_only, of_stages)
        self.any_ties = bool(tied)
        self._first_names = {name: first_names[name] for name, _ in _named_tensors(self.module) if name in first_names}
        self._built_on_meta = frozenset(self.names_on_meta())
        self.hooks = SpineHooks(root, self.module, layers)
        self.changes = changes or ChangeRecord()
        self.changes.follow(self.module, self.hooks.modules, self.root)
        refuse_partial_norms(parameters_of_all_models)
        refuse_partial_steps(parameters_of_all_models)
        note_blocks_that_are_off()
        refuse_steps_in_backward()
        refuse_scaler_of_torch()
        follow_checkpoints()

    @property
    def is_initialised_at_once(self) -> bool:
        """True if initial weights are made at construction: by ``param_init_fn`` or a recorded constructor."""
        return self._param_init_fn is not None or self._record is not None

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters; without parameters, the rank's own."""
        return self.changes.device

    def names_on_meta(self) -> list[str]:
        """Names of the parameters and buffers that have no values yet."""
        return [name for name, tensor in _named_tensors(self.module) if tensor.is_meta]

    def refuse_calls_elsewhere(self) -> None:
        """Make modules of other ranks, also those that have taken another's place, raise ``RuntimeError`` in a call."""
        refuse_calls_elsewhere(self.root, self._owners, self.module)

    def new_tie(self) -> list[str]:
        """Names of a parameter that were parameters of different ranks when the model was wrapped; empty for none."""
        return new_tie(self.root, self._owners)

    def check_no_new_tie(self) -> None:
        """Raise ``RuntimeError`` for parameters of different ranks that have become one."""
        if names := self.new_tie():
            raise RuntimeError(
                f"{' and '.join(names)} have become one parameter, and different pipeline ranks hold them: each would "
                f"train a copy of its own. Tie them before the model is wrapped."
            )

    def check_materialised(self) -> None:
        """Raise ``RuntimeError`` for parameters or buffers without values."""
        without = self.names_on_meta()
        if without:
            raise RuntimeError(
                f"rank {self._rank} has {counted(len(without), 'parameter or buffer', 'parameters or buffers')} on the "
                f"meta device without values ({without[0]} is the first). Call move_model_to_device() or "
                "materialise(), which initialise them, or nxdpp.load_pretrained(model, directory); and make the "
                "optimizer after it."
            )

    def check_optimizers(self) -> None:
        """Raise ``RuntimeError`` for an optimizer made before wrapping, which holds parameters of other ranks."""
        check_no_optimizer_has({name: parameter for parameter, name in self._others.items()})

    def values(self) -> RankValues:
        """The present values, for a comparison with other ranks."""
        parameters = dict(listings.named_parameters(self.module))
        if self.loads:
            # A file may have the very weights that this rank has drawn.
            self._initial.held = {}
        # DTensors count no changes.
        rows = self._samples_of_rows(self._initial.held)
        self._initial.held = {
            name: known for name, known in self._initial.held.items() if rows.get(name) == self._held_rows[name]
        }
        return RankValues(
            self._rank,
            self._initial,
            parameters,
            self.tied.copies(),
            self.loads,
            self.has_loaded_state,
            self.attributes,
        )

    def note_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note a load of ``state_dict``, from which each replica of shards takes other rows."""
        self.has_loaded_state = True
        self._initial.held = {name: known for name, known in self._initial.held.items() if name not in state_dict}
        whole = [each for each in state_dict.values() if isinstance(each, torch.Tensor) and not each.is_meta]
        if any(map(is_sharded, self.module.parameters())):
            self.loaded = digest(self.loaded + b"".join(map(sample, whole)) + b"load")

    def kept_initial_weights(self) -> dict[str, bytes]:
        """Samples of the initial weights that this rank has as they were, by name."""
        return self._initial.kept(dict(listings.named_parameters(self.module)))

    def hold_initial_weights(self, kept: Mapping[str, bytes]) -> None:
        """Take the present rows for the initial weights of which there are samples ``kept``, until they change."""
        self._initial.held = dict(kept)
        self._held_rows = self._samples_of_rows(kept)

    def _samples_of_rows(self, names: Collection[str]) -> dict[str, bytes]:
        return {
            name: sample(local_rows(parameter))
            for name, parameter in listings.named_parameters(self.module)
            if name in names
        }

    def forget_initial_weights(self) -> None:
        """Drop the samples of the initial weights: the ranks have compared them."""
        self._initial.forget()

    def attribute_lines(self) -> list[str]:
        """A line for each field of a configuration, and each plain attribute, that the replicas have to compare."""
        return [*self._configuration, *attribute_lines(self.attributes)]

    @property
    def seed(self) -> int:
        """``torch.initial_seed()`` at construction."""
        return self._initial.seed

    def materialise(self) -> bool:
        """Give initial weights to all that is on the meta device; return whether there was any. Not collective.

        Raises:
            RuntimeError: for a tensor that nothing initialises, and for an optimizer that holds a parameter on the meta
                device. Nothing is changed then.
        """
        places = self._places()
        if not places:
            return False
        is_loaded = any(
            isinstance(tensor, nn.Parameter) and not tensor.is_meta and name in self._built_on_meta
            for name, tensor in _named_tensors(self.module)
        )
        replaced = {place.name: place.tensor for place in places if isinstance(place.tensor, nn.Parameter)}
        check_no_optimizer_holds(replaced, "Make the optimizer after move_model_to_device().")
        values, origin = self._values(places)
        if origin is not None and not is_loaded:
            self.origin = f"initial weights from {origin}"
        self.replace_tensors([place.tensor for place in places], values)
        watch_replaced(replaced)
        return True

    def initial_weights_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Initial weights for ``tensors`` of this rank on the meta device, which keep their places; not collective.

        A module's initialiser may compute one tensor from another. So all meta tensors of these modules are made.

        Raises ``RuntimeError`` for a tensor that nothing initialises.
        """
        if not tensors:
            return []
        wanted = set(map(id, tensors))
        modules = {place.module for place in self._places() if id(place.tensor) in wanted}
        places = [place for place in self._places() if place.module in modules]
        values, origin = self._values(places)
        if origin is not None:
            self.origin = f"initial weights from {origin}"
        made = {id(place.tensor): value for place, value in zip(places, values, strict=True)}
        return [made[id(tensor)] for tensor in tensors]

    def replace_tensors(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Put each tensor of ``new`` wherever the tensor of ``old`` at the same index is, in tree and whole model."""
        replacements = {id(before): after for before, after in zip(old, new, strict=True)}
        for module in {*listings.modules(self.module), *listings.modules(self.root)}:
            for registry in _registries(module):
                for key, tensor in registry.items():
                    if id(tensor) in replacements:
                        registry[key] = replacements[id(tensor)]

    def _values(self, places: Sequence[MetaTensor]) -> tuple[list[torch.Tensor], str | None]:
        """Values for ``places``, and the origin of their random numbers."""
        recorded = [place for place in places if self._is_recorded(place.tensor)]
        others = [place for place in places if place not in recorded]
        made, drawn = initial_weights(self.root, others, self._seed, self._param_init_fn, self._record)
        if self._record is None or self._param_init_fn is not None:
            return made, f"torch.initial_seed() {self._seed}" if drawn else None
        values = dict(zip(others, made, strict=True))
        for place in recorded:
            whole = self._record.materialise(whole_of(place.tensor))
            values[place] = with_type_of(own_part(whole, place.tensor), place.tensor)
        return [values[place] for place in places], self._record.origin

    def _is_recorded(self, tensor: torch.Tensor) -> bool:
        # param_init_fn replaces what the constructor drew.
        tensor = whole_of(tensor)
        if self._record is None or self._param_init_fn is not None or not self._record.knows(tensor):
            return False
        # A parameter from torch.empty has no values; a buffer from there may be one that forward fills.
        return self._record.is_written(tensor) or not isinstance(tensor, nn.Parameter)

    def _places(self) -> list[MetaTensor]:
        """One place for each tensor on the meta device, however many names it has."""
        places: dict[int, MetaTensor] = {}
        for name, tensor in _named_tensors(self.module):
            if tensor.is_meta:
                places.setdefault(id(tensor), MetaTensor(self._first_names.get(name, name), tensor))
        return list(places.values())


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts in which a module keeps tensors: parameters, buffers and plain attributes."""
    return PARAMETERS.of(module), BUFFERS.of(module), vars(module)


def _named_tensors(tree: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of all modules, under all their names."""
    for prefix, module in listings.named_modules(tree, remove_duplicate=False):
        for registry in _registries(module):
            for key, tensor in registry.items():
                if isinstance(tensor, torch.Tensor):
                    yield (f"{prefix}.{key}" if prefix else key), tensor


def _first_names(root: nn.Module) -> dict[str, str]:
    """For each name of a tensor, the name under which it is initialised: the first that is not tied to another."""
    tied = _names_tied_to_others(root)
    groups: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(root):
        groups.setdefault(id(tensor), []).append(name)
    first = {tensor: min(names, key=lambda name: name in tied) for tensor, names in groups.items()}
    return {name: first[tensor] for tensor, names in groups.items() for name in names}


def _names_tied_to_others(root: nn.Module) -> set[str]:
    """Names that transformers models declare as copies: ``lm_head.weight``, a copy of the embedding's weight."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in listings.named_modules(root)
        if isinstance(module, PreTrainedModel)
        for name in module.all_tied_weights_keys
    }
