"""Initial weights of the tensors of a rank's part that are on the meta device."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.ground.torch_names import BUFFERS, PARAMETERS
from nxdpp.initialization.allocation import with_type_of
from nxdpp.initialization.initialisers import ParameterInitialiser
from nxdpp.initialization.materialise import MetaTensor, initial_weights
from nxdpp.initialization.parts import own_part, whole_of
from nxdpp.initialization.record import record_of
from nxdpp.tracing.modules import listings


class InitialValues:
    """The initial weights of ``root``, which is whole yet: names that share a tensor are found now.

    Attributes:
        is_made_at_once: ``True`` if they are made at construction: by ``param_init_fn`` or a recorded constructor.
        origin: the seed or generator state of the weights that were drawn, as text; ``None`` where none were. It must
            be equal on all ranks that have one.
    """

    def __init__(self, root: nn.Module, param_init_fn: ParameterInitialiser | None) -> None:
        self._root, self._tree = root, root
        self._seed, self._param_init_fn, self._record = torch.initial_seed(), param_init_fn, record_of(root)
        self._first_names = _first_names(root)
        self._built_on_meta: frozenset[str] = frozenset()
        self.is_made_at_once = param_init_fn is not None or self._record is not None
        self.origin: str | None = None

    def keep(self, tree: nn.Module) -> None:
        """Keep the weights of ``tree`` alone, which is this rank's part of the model."""
        self._tree = tree
        self._first_names = {
            name: self._first_names[name] for name, _ in named_tensors(tree) if name in self._first_names
        }
        self._built_on_meta = frozenset(self.names_on_meta())

    def names_on_meta(self) -> list[str]:
        """Names of the parameters and buffers that have no values yet."""
        return [name for name, tensor in named_tensors(self._tree) if tensor.is_meta]

    def places(self) -> list[MetaTensor]:
        """Return one place for each tensor on the meta device, however many names it has."""
        places: dict[int, MetaTensor] = {}
        for name, tensor in named_tensors(self._tree):
            if tensor.is_meta:
                places.setdefault(id(tensor), MetaTensor(self._first_names.get(name, name), tensor))
        return list(places.values())

    def of_places(self, places: Sequence[MetaTensor]) -> list[torch.Tensor]:
        """Make the weights of all ``places``. Raises ``RuntimeError`` for a tensor that nothing initialises."""
        is_loaded = any(
            isinstance(tensor, nn.Parameter) and not tensor.is_meta and name in self._built_on_meta
            for name, tensor in named_tensors(self._tree)
        )
        return self._made(places, has_origin=not is_loaded)

    def of_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make the weights of ``tensors`` on the meta device, which keep their places.

        A module's initialiser may compute one tensor from another. So all meta tensors of these modules are made.

        Raises ``RuntimeError`` for a tensor that nothing initialises.
        """
        if not tensors:
            return []
        wanted = set(map(id, tensors))
        modules = {place.module for place in self.places() if id(place.tensor) in wanted}
        places = [place for place in self.places() if place.module in modules]
        made = {id(place.tensor): value for place, value in zip(places, self._made(places), strict=True)}
        return [made[id(tensor)] for tensor in tensors]

    def _made(self, places: Sequence[MetaTensor], has_origin: bool = True) -> list[torch.Tensor]:
        """Make the weights of ``places``, and note the origin of their random numbers."""
        recorded = [place for place in places if self._is_recorded(place.tensor)]
        others = [place for place in places if place not in recorded]
        made, drawn = initial_weights(self._root, others, self._seed, self._param_init_fn, self._record)
        values = dict(zip(others, made, strict=True))
        if self._record is None or self._param_init_fn is not None:
            origin = f"torch.initial_seed() {self._seed}" if drawn else None
        else:
            origin = self._record.origin
            for place in recorded:
                whole = self._record.materialise(whole_of(place.tensor))
                values[place] = with_type_of(own_part(whole, place.tensor), place.tensor)
        if has_origin and origin is not None:
            self.origin = f"initial weights from {origin}"
        return [values[place] for place in places]

    def _is_recorded(self, tensor: torch.Tensor) -> bool:
        # param_init_fn replaces what the constructor drew.
        tensor = whole_of(tensor)
        if self._record is None or self._param_init_fn is not None or not self._record.knows(tensor):
            return False
        # A parameter from torch.empty has no values; a buffer from there may be one that forward fills.
        return self._record.is_written(tensor) or not isinstance(tensor, nn.Parameter)


def registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts in which ``module`` keeps tensors: parameters, buffers and plain attributes."""
    return PARAMETERS.of(module), BUFFERS.of(module), vars(module)


def named_tensors(tree: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of all modules, under all their names."""
    for prefix, module in listings.named_modules(tree, remove_duplicate=False):
        for registry in registries(module):
            for key, tensor in registry.items():
                if isinstance(tensor, torch.Tensor):
                    yield (f"{prefix}.{key}" if prefix else key), tensor


def _first_names(root: nn.Module) -> dict[str, str]:
    """For each name of a tensor, the name under which it is initialised: the first that is not tied to another."""
    tied = _names_tied_to_others(root)
    groups: dict[int, list[str]] = {}
    for name, tensor in named_tensors(root):
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
