"""What one rank holds of a model: its modules, the copies of tied weights, and where their first values come from."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.initialization.allocation import with_type_of
from nxdpp.initialization.initialisers import ParameterInitialiser
from nxdpp.initialization.materialise import MetaTensor, initial_weights
from nxdpp.initialization.record import record_of
from nxdpp.parallel_layers.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.pipeline.local.tied_weights import TiedWeight
from nxdpp.pipeline.local.tree import (
    build_local_module,
    check_has_values_here,
    free_others,
    local_names,
    names_elsewhere,
    shared_names,
    tied_names,
)
from nxdpp.pipeline.partition.assignment import Owners


class LocalPart:
    """The part of ``root`` that ``rank`` holds; what it does not hold is freed.

    Args:
        root: the whole model.
        owners: the ranks that hold each parameter.
        rank: this rank of the pipeline.
        layers: names of the transformer layers.
        seed: which random numbers parameters on the meta device get.
        param_init_fn: initialises a module; see ``initial_weights``.

    Attributes:
        module: the tree of local modules, under their original names.
        tied: the weights that other ranks hold, too.
        any_ties: whether any ranks of the pipeline have such weights.
        aliases: the names, in the whole model, of each parameter and each buffer that has several.
        origin: a line that says what random numbers the values came from; ``None`` where they came from none. It must
            be the same on all ranks that have one.
    """

    def __init__(
        self,
        root: nn.Module,
        owners: Owners,
        rank: int,
        layers: Collection[str],
        seed: int,
        param_init_fn: ParameterInitialiser | None,
    ) -> None:
        local = local_names(owners, rank)
        check_has_values_here(root, local)
        # Numbered over the whole model: all ranks must mean the same weight by a number.
        tied = tied_names(root, owners)
        self.tied = [
            TiedWeight(next(name for name in names if name in local), tuple(ranks), number)
            for number, (names, ranks) in enumerate(tied)
            if rank in ranks
        ]
        self.any_ties = bool(tied)
        self.origin: str | None = None
        self._root = root
        self._seed = seed
        self._param_init_fn = param_init_fn
        self._record = record_of(root)
        # Now, while the model is whole: what is freed is no longer the same object.
        first_names = _first_names(root)
        self.aliases = shared_names(root)
        elsewhere = names_elsewhere(owners, rank)
        whole = dict(root.named_parameters())
        free_others(root, local, elsewhere)
        self.module = build_local_module(root, local, layers, elsewhere)
        kept = set(map(id, self.module.parameters()))
        watch_replaced({name: parameter for name, parameter in whole.items() if id(parameter) not in kept})
        self._first_names = {name: first_names[name] for name, _ in _named_tensors(self.module) if name in first_names}
        self._built_without_memory = frozenset(self.without_values())

    @property
    def is_made_at_once(self) -> bool:
        """Whether values are made when the model is wrapped: by a function, or as a constructor would."""
        return self._param_init_fn is not None or self._record is not None

    def without_values(self) -> list[str]:
        """Names of what is still on the meta device."""
        return [name for name, tensor in _named_tensors(self.module) if tensor.is_meta]

    def materialise(self) -> bool:
        """Give values to all that is on the meta device; whether there was anything. Not collective.

        Raises ``RuntimeError`` for what nothing gives a value to, and for an optimizer that holds a parameter without
        values; nothing is changed then.
        """
        places = self._places()
        if not places:
            return False
        is_loaded = any(
            isinstance(tensor, nn.Parameter) and not tensor.is_meta and name in self._built_without_memory
            for name, tensor in _named_tensors(self.module)
        )
        replaced = {place.name: place.tensor for place in places if isinstance(place.tensor, nn.Parameter)}
        check_no_optimizer_holds(replaced, "Make the optimizer after move_model_to_device().")
        values, origin = self._values(places)
        if origin is not None and not is_loaded:
            self.origin = f"initial values from {origin}"
        replace_tensors([self.module, self._root], [place.tensor for place in places], values)
        watch_replaced(replaced)
        return True

    def _values(self, places: Sequence[MetaTensor]) -> tuple[list[torch.Tensor], str | None]:
        """Values for ``places``, and what random numbers they are from."""
        recorded = [place for place in places if self._is_recorded(place.tensor)]
        others = [place for place in places if place not in recorded]
        made, drawn = initial_weights(self._root, others, self._seed, self._param_init_fn, self._record)
        if self._record is None or self._param_init_fn is not None:
            return made, f"torch.initial_seed() {self._seed}" if drawn else None
        values = dict(zip(others, made, strict=True))
        values |= {place: with_type_of(self._record.materialise(place.tensor), place.tensor) for place in recorded}
        return [values[place] for place in places], self._record.origin

    def _is_recorded(self, tensor: torch.Tensor) -> bool:
        # A function of the user's is asked in place of the constructor.
        if self._record is None or self._param_init_fn is not None or not self._record.knows(tensor):
            return False
        # A parameter from torch.empty has no values; a buffer from there may be one that forward fills.
        return self._record.is_written(tensor) or not isinstance(tensor, nn.Parameter)

    def _places(self) -> list[MetaTensor]:
        """One for each tensor without values, whatever names it has."""
        places: dict[int, MetaTensor] = {}
        for name, tensor in _named_tensors(self.module):
            if tensor.is_meta:
                places.setdefault(id(tensor), MetaTensor(self._first_names.get(name, name), tensor))
        return list(places.values())


def replace_tensors(trees: Sequence[nn.Module], old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    """Put each of ``new`` wherever the one of ``old`` is that has its number, in all modules of ``trees``."""
    replacements = {id(before): after for before, after in zip(old, new, strict=True)}
    for module in dict.fromkeys(module for tree in trees for module in tree.modules()):
        for registry in _registries(module):
            for key, tensor in registry.items():
                if id(tensor) in replacements:
                    registry[key] = replacements[id(tensor)]


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps tensors: as parameters, as buffers, and as plain attributes."""
    return module._parameters, module._buffers, vars(module)


def _named_tensors(tree: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of all modules, under all their names."""
    for prefix, module in tree.named_modules(remove_duplicate=False):
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
    """What models of transformers declare as a copy: ``lm_head.weight``, which is made to be the embedding's."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in root.named_modules()
        if isinstance(module, PreTrainedModel)
        for name in module.all_tied_weights_keys
    }
