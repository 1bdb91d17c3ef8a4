"""Attributes of modules above layers that code of the user reads: a graph belongs to their values.

A loss weight may change between two steps (``model.beta = 0.1``), and so may a function, a loss module or a mode. The
trace reads them, so other values need another graph.
"""

from argparse import Namespace
from collections.abc import Collection, Hashable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
from torch import fx, nn
from transformers import PreTrainedConfig

from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.object_state import PLAIN
from nxdpp.tracing.state.state_walk import ANY_ATTRIBUTE, HOOKS, OF_MODULES

Settings = tuple[tuple[int, str, Hashable], ...]
"""Values with the number of their module and their path; the number of modes of layers is ``OF_LAYERS``."""

OF_LAYERS = -1

_MOST_ITEMS = 100
_MOST_BYTES = 1 << 16
_DEEPEST = 4
_MOST_VALUES = 1_000

# Objects without a content of their own.
_WHOLE = (nn.Module, fx.Proxy, type, BuiltinFunctionType, FunctionType, MethodType, ModuleType)


class SpineSettings:
    """The attributes on which a trace of the spine depends.

    Args:
        spine: the modules that are traced through.
        names: names of attributes in the code of the user that the spine runs.
        owned: names of parameters and buffers, below the first module of ``spine``, that not every rank holds.
        asked: names of attributes that the code reads of objects other than ``self``.

    Attributes:
        of_layers: ``training`` with all modules, ``requires_grad`` with all parameters, where the code may read them.
    """

    def __init__(
        self,
        spine: Sequence[nn.Module],
        names: Collection[str],
        owned: Collection[str] = (),
        asked: Collection[str] = (),
    ) -> None:
        self._spine = list(spine)
        self._names = frozenset(names)
        self._all = bool(self._names & ANY_ATTRIBUTE)
        self._left = 0
        whole = self._spine[0] if self._spine else nn.Module()
        things: dict[str, list[Any]] = {
            "training": list(listings.modules(whole)),
            "requires_grad": list(listings.parameters(whole)),
        }
        self.of_layers = [(name, each) for name, each in things.items() if self._all or name in asked]
        parts = {id(module) for module in self._spine}
        places = {module: name for name, module in listings.named_modules(self._spine[0])} if self._spine else {}
        self._buffers = [
            [key for key in module._buffers if (f"{places[module]}.{key}" if places[module] else key) not in owned]
            for module in self._spine
        ]
        self._children = [
            [
                key
                for key, child in module._modules.items()
                if child is not None and id(child) not in parts and next(listings.parameters(child), None) is None
            ]
            for module in self._spine
        ]

    def present(self) -> Settings:
        """The present values, each with the number of its module and its path."""
        self._left = _MOST_VALUES
        present = tuple(
            (number, path, value)
            for number, module in enumerate(self._spine)
            for path, value in self._of_module(number, module)
        )
        if not self.of_layers:
            return present
        return *present, *((OF_LAYERS, name, bytes(map(attrgetter(name), things))) for name, things in self.of_layers)

    def lines(self) -> list[str]:
        """A line for each parameter that is not trained, and each module in another mode than the model, if asked."""
        whole = self._spine[0] if self._spine else nn.Module()
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
            yield from ((name, _Same(hook)) for hook in attributes[name].values())
        if "forward" in attributes:
            yield "forward", _Same(attributes["forward"])
        yield from ((key, _Same(module._modules.get(key))) for key in self._children[number])
        if not self._names:
            return
        yield from ((key, _Same(module._buffers.get(key))) for key in self._buffers[number])
        for name, value in attributes.items():
            if name not in OF_MODULES and self._is_named(name):
                yield name, self._key(value, 0)

    def _is_named(self, name: str) -> bool:
        return self._all or name in self._names

    def _key(self, value: Any, depth: int) -> Hashable:
        kind = type(value)
        self._left -= 1
        if kind in PLAIN or isinstance(value, Enum):
            # 0.0 is not -0.0, NaN is NaN.
            return kind, repr(value) if kind in (float, complex) else value
        if isinstance(value, numpy.ndarray) and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
            return kind, value.shape, str(value.dtype), value.tobytes()
        if depth < _DEEPEST and self._left > 0 and (items := self._content(value)) is not None:
            return kind, tuple((_plain(key), self._key(item, depth + 1)) for key, item in items)
        return _Same(value)

    def _content(self, value: Any) -> list[tuple[Any, Any]] | None:
        """The content of a container, or of an object of the user; ``None`` for others."""
        if isinstance(value, dict | list | tuple):
            if len(value) > _MOST_ITEMS:
                return None
            return list(value.items() if isinstance(value, dict) else enumerate(value))
        is_known = isinstance(value, SimpleNamespace | Namespace | PreTrainedConfig)
        if isinstance(value, _WHOLE):
            return None
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or (is_framework(type(value).__module__) and not is_known):
            return None
        return [(name, item) for name, item in attributes.items() if self._is_named(name)]


def _plain(key: Any) -> Hashable:
    return (type(key), key) if type(key) in PLAIN else _Same(key)


class _Same:
    """An object that is equal only to itself."""

    def __init__(self, value: Any) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)
