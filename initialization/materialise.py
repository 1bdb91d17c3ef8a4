"""Giving values to what a rank holds of a model that was built without memory.

A parameter is initialised in the module whose name for it comes first in the model, even where that module runs on
another rank: a head that shares the embedding's weight gets what the embedding's initialisation makes of it::

    first rank    embed.weight ─▶ memory ─▶ init(embed)                 ─▶ embed
    last rank     embed.weight ─▶ memory ─▶ init(embed) ─▶ given back   ─▶ head, which runs here
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxdpp.initialization.allocation import MarkedMemory, allocate, count_unwritten, replacement, with_type_of
from nxdpp.initialization.initialisers import (
    HuggingFaceInitialiser,
    ParameterInitialiser,
    call_param_init_fn,
    has_own_tensors,
    reset_parameters,
)
from nxdpp.initialization.named_streams import NamedStreams
from nxdpp.initialization.record import ConstructorRecord

_SHOWN = 8


@dataclass(frozen=True, eq=False)
class MetaTensor:
    """A tensor without values, and where it is initialised: ``name`` is that of the model's first name for it."""

    name: str
    meta: torch.Tensor

    @property
    def module(self) -> str:
        """The name of the module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Its name in that module."""
        return self.name.rpartition(".")[2]


def initial_weights(
    root: nn.Module,
    places: Sequence[MetaTensor],
    seed: int,
    param_init_fn: ParameterInitialiser | None,
    record: ConstructorRecord | None = None,
) -> tuple[list[torch.Tensor], bool]:
    """Values for ``places``, on the CPU, in their order, and whether random numbers went into them; not collective.

    ``root`` is the whole model; when this returns or raises it is as it was. Each module that has one of the places is
    given to ``param_init_fn``. Without one, models of transformers use their ``_init_weights``, other modules their
    ``reset_parameters``; with one, buffers that it left alone are made as in the ``record`` of the constructor, or
    these are asked for them.

    Raises:
        RuntimeError: for tensors that nobody has initialised, or only in part, and for those that were replaced by one
            of another shape or dtype.
    """
    before = _tensors_at(root, places)
    try:
        # In any context: temporaries that are not on the CPU would draw from another generator, or from none.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            allocated = [allocate(place.meta) for place in places]
            for place, tensor in zip(places, allocated, strict=True):
                _put(root, place, tensor)
            initialiser = _Initialisation(root, places, seed, param_init_fn, record)
            initialiser.run()
            made = zip(_tensors_at(root, places), allocated, strict=True)
            values = [value if value is own else replacement(own, value) for value, own in made]
            return values, initialiser.has_drawn
    finally:
        for place, tensor in zip(places, before, strict=True):
            _put(root, place, tensor)


class _Initialisation:
    def __init__(
        self,
        root: nn.Module,
        places: Sequence[MetaTensor],
        seed: int,
        param_init_fn: ParameterInitialiser | None,
        record: ConstructorRecord | None,
    ) -> None:
        self._root = root
        self._record = record
        self._places = places
        self._function = param_init_fn
        self._huggingface = HuggingFaceInitialiser(root)
        fresh = {place.name: tensor for place, tensor in zip(places, _tensors_at(root, places), strict=True)}
        own = set(map(id, fresh.values()))
        everything = [*root.parameters(), *root.buffers()]
        # Loaded before, or built in memory.
        self._done = [tensor for tensor in everything if id(tensor) not in own and not tensor.is_meta]
        self._streams = NamedStreams(seed, fresh, self._done)

    @property
    def has_drawn(self) -> bool:
        return self._streams.has_drawn

    def run(self) -> None:
        with MarkedMemory(), self._streams:
            if self._function is not None:
                for name in self._modules(self._places):
                    self._call(name, self._function)
                self._refuse([place for place in self._left() if isinstance(place.meta, nn.Parameter)])
            else:
                self._huggingface.run(set(self._modules(self._places)), self._done, self._streams.begin)
        if self._function is not None:
            self._take_what_is_recorded()
            self._guard_what_is_written()
        with MarkedMemory(), self._streams:
            # Children first: a parent may mean to change what they do.
            for name in reversed(self._modules_to_complete()):
                self._complete(name)
        self._refuse(self._left())
        self._refuse_others()

    def _take_what_is_recorded(self) -> None:
        for place in self._left():
            if self._record is not None and self._record.is_written(place.meta):
                _put(self._root, place, with_type_of(self._record.materialise(place.meta), place.meta))

    def _guard_what_is_written(self) -> None:
        left = {place.name for place in self._left()}
        written = [tensor for place, tensor in self._current() if place.name not in left]
        self._done += written
        self._streams.guard(written)

    def _modules_to_complete(self) -> list[str]:
        """Those with something left, and those around them, in the model's order.

        A module with tensors of its own may reach into others: where its own are on another rank it is asked, too.
        """
        having = set(self._modules(self._left()))
        return [
            name
            for name, module in self._root.named_modules(remove_duplicate=False)
            if name in having
            or (
                has_own_tensors(module)
                and not self._huggingface.knows(name)
                and any(not name or inner.startswith(f"{name}.") for inner in having)
            )
        ]

    def _call(self, name: str, function: ParameterInitialiser) -> None:
        self._streams.begin(name)
        try:
            call_param_init_fn(function, self._root.get_submodule(name))
        except Exception as error:
            error.add_note(f"in param_init_fn, called for {name or 'the model itself'}")
            raise

    def _complete(self, name: str) -> None:
        """As the constructor does: first what the module itself does, then what its model makes of that."""
        self._streams.begin(name)
        reset_parameters(self._root.get_submodule(name))
        if self._huggingface.knows(name):
            self._huggingface.run_one(name, self._done)

    def _current(self) -> list[tuple[MetaTensor, torch.Tensor]]:
        return list(zip(self._places, _tensors_at(self._root, self._places), strict=True))

    def _left(self) -> list[MetaTensor]:
        """Those of the places that are not wholly written."""
        return [place for place, tensor in self._current() if not self._is_written(tensor)]

    def _is_written(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta:
            return False
        if tensor.is_floating_point() or tensor.is_complex():
            return count_unwritten(tensor) == 0
        return self._streams.wrote(tensor) or tensor.numel() == 0

    def _modules(self, places: Sequence[MetaTensor]) -> list[str]:
        """The modules that have these, in the model's order."""
        having = {place.module for place in places}
        return [name for name, _ in self._root.named_modules(remove_duplicate=False) if name in having]

    def _refuse(self, left: Sequence[MetaTensor]) -> None:
        if not left:
            return
        lines = []
        for place in left[:_SHOWN]:
            tensor = getattr(self._root.get_submodule(place.module), place.key)
            module = type(self._root.get_submodule(place.module)).__name__
            count = (0 if tensor.is_meta else count_unwritten(tensor)) or tensor.numel()
            lines.append(f"  {place.name} of {module}: {count} of {tensor.numel()} elements")
        if len(left) > _SHOWN:
            lines.append(f"  and {len(left) - _SHOWN} more")
        raise RuntimeError(
            f"{len(left)} parameters or buffers are left without values by {self._who()}:\n" + "\n".join(lines) + "\n"
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        build = (
            "build the model with nxdpp.deferred_init, which does what its constructor does (nxdpp.init_on_device "
            "makes buffers so), or load them with nxdpp.load_pretrained"
        )
        if self._function is None:
            return f"Give the modules a reset_parameters() that writes them, or NxDPPModel a param_init_fn; {build}."
        return (
            f"It is called with each of these modules, and must write all that is the module's own, in place. Have it "
            f"do so; or leave it out, and {build}."
        )

    def _refuse_others(self) -> None:
        for place, tensor in self._current():
            if (tensor.shape, tensor.dtype) != (place.meta.shape, place.meta.dtype):
                raise RuntimeError(
                    f"{place.name} is {place.meta.dtype} of {list(place.meta.shape)} in the model, and was replaced by "
                    f"{tensor.dtype} of {list(tensor.shape)} by {self._who()}. Write into it, as torch.nn.init does, "
                    f"or copy_(); post_partition_hooks is the place to cast it."
                )

    def _who(self) -> str:
        if self._function is not None:
            return "param_init_fn"
        return "_init_weights and reset_parameters"


def _tensors_at(root: nn.Module, places: Sequence[MetaTensor]) -> list[torch.Tensor]:
    return [getattr(root.get_submodule(place.module), place.key) for place in places]


def _put(root: nn.Module, place: MetaTensor, tensor: torch.Tensor) -> None:
    """In the module's place for it, without the checks of assignment."""
    module = root.get_submodule(place.module)
    registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
    for registry in registries:
        if place.key in registry:
            registry[place.key] = tensor
            return
    raise AssertionError(f"{place.name} was found in the model")
