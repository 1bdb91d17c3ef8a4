"""Modes, hooks, loss modules and buffers of modules above layers: a graph belongs to them.

They may change between two steps. The trace reads them, so other ones need another graph. Other attributes that code of
the user reads are in ``read_values``.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from nxdpp.ground.torch_names import BUFFERS, MODULES
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.state_walk import ANY_ATTRIBUTE, HOOKS

Settings = tuple[tuple[int, str, Hashable], ...]
"""Values with the number of their module and their path; the number of modes of layers is ``OF_LAYERS``."""

OF_LAYERS = -1


class SpineSettings:
    """The parts of modules on which a trace of the spine depends.

    ``names`` are attributes in the code of the user that the spine runs, ``asked`` the ones that it reads of objects
    other than ``self``. Not every rank holds the ``owned`` parameters and buffers, named below the first module of
    ``spine``. ``of_layers`` has ``training`` with all modules, ``requires_grad`` with all parameters, where the code
    may read them.
    """

    def __init__(
        self,
        spine: Sequence[nn.Module],
        names: Collection[str],
        owned: Collection[str] = (),
        asked: Collection[str] = (),
    ) -> None:
        self.spine = list(spine)
        self._has_names = bool(names)
        takes_all = not ANY_ATTRIBUTE.isdisjoint(names)
        whole = self.spine[0] if self.spine else nn.Module()
        things: dict[str, list[Any]] = {
            "training": list(listings.modules(whole)),
            "requires_grad": list(listings.parameters(whole)),
        }
        self.of_layers = [(name, each) for name, each in things.items() if takes_all or name in asked]
        parts = {id(module) for module in self.spine}
        places = {module: name for name, module in listings.named_modules(self.spine[0])} if self.spine else {}
        self._buffers = [
            [key for key in BUFFERS.of(module) if (f"{places[module]}.{key}" if places[module] else key) not in owned]
            for module in self.spine
        ]
        self._children = [
            [
                key
                for key, child in MODULES.of(module).items()
                if child is not None and id(child) not in parts and next(listings.parameters(child), None) is None
            ]
            for module in self.spine
        ]

    def present(self) -> Settings:
        """The present values, each with the number of its module and its path."""
        present = tuple(
            (number, path, value)
            for number, module in enumerate(self.spine)
            for path, value in self._of_module(number, module)
        )
        if not self.of_layers:
            return present
        return *present, *((OF_LAYERS, name, bytes(map(attrgetter(name), things))) for name, things in self.of_layers)

    def lines(self) -> list[str]:
        """A line for each parameter that is not trained, and each module in another mode than the model, if asked."""
        whole = self.spine[0] if self.spine else nn.Module()
        named: dict[str, Iterator[tuple[str, Any]]] = {
            "training": listings.named_modules(whole),
            "requires_grad": listings.named_parameters(whole),
        }
        usual = {"training": whole.training, "requires_grad": True}
        return [
            f"{name} of {path}: {getattr(thing, name)}"
            for name, _ in self.of_layers
            for path, thing in named[name]
            if getattr(thing, name) != usual[name]
        ]

    def _of_module(self, number: int, module: nn.Module) -> Iterator[tuple[str, Hashable]]:
        attributes = vars(module)
        yield "training", module.training
        for name in HOOKS:
            yield from ((name, Same(hook)) for hook in attributes[name].values())
        if "forward" in attributes:
            yield "forward", Same(attributes["forward"])
        yield from ((key, Same(MODULES.of(module).get(key))) for key in self._children[number])
        if self._has_names:
            yield from ((key, Same(BUFFERS.of(module).get(key))) for key in self._buffers[number])


class Same:
    """An object that is equal only to itself."""

    def __init__(self, value: Any) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)
