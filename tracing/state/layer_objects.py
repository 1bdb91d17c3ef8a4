"""Tensors in Python objects that the code of modules below the spine can reach, such as an object that layers share.

::

    layers.1.prev = [layers.0]            forward of layers.1:  self.prev[0].out       reached: layers.1.prev[0].out
    layer.context = SimpleNamespace()     forward:  self.context.value                 reached: layers.1.context.value

Code reaches the names that it loads. Code of torch, transformers, NumPy and the standard library is not looked into.
"""

import threading
import weakref
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from nxdpp.tracing.code.names import is_framework, names_in, parts_of, variables_of
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.object_state import MISSING, PLAIN, content_of, slots_of
from nxdpp.tracing.state.state_walk import HOOKS, MOST_ITEMS, OF_MODULES

_DEEPEST = 8
_MOST_OBJECTS = 10_000
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OPEN = (SimpleNamespace, Namespace, UserDict, UserList, threading.local)


class TensorPlace(NamedTuple):
    """A tensor in an object, with the number of its in-place changes. ``key`` is its index or key there."""

    tensor: torch.Tensor
    version: int
    path: str
    key: Any
    length: int | None


class PlainValue(NamedTuple):
    """A number, a text or a similar value in an object. ``key`` is its name, index or key there."""

    value: Any
    holder: Any
    path: str
    key: Any


class Reached:
    """The objects that modules and their code can reach.

    Args:
        roots: modules or other objects, each with its path.
        names_of: gives the names that the code of a function uses.
        names: names that are known; without them the code of the modules gives them.

    Attributes:
        names: the names that the code uses.
        holders: mutable objects and tensors by their id, each with its path.
        places: tensors, by the id of their holder and their key there.
        plain: other values without content, in the same way.
        functions: the functions that the code may call.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, Any]],
        names_of: Callable[[FunctionType], AbstractSet[str]] = names_in,
        names: AbstractSet[str] | None = None,
    ) -> None:
        self.names: set[str] = set(names or ())
        self._names_of = names_of
        while True:
            before = len(self.names)
            self._walk(roots)
            if names is not None or len(self.names) == before:
                return

    def _walk(self, roots: Sequence[tuple[str, Any]]) -> None:
        self.holders: dict[int, tuple[Any, str]] = {}
        self.places: dict[tuple[int, Any], TensorPlace] = {}
        self.plain: dict[tuple[int, Any], PlainValue] = {}
        self.functions: dict[FunctionType, None] = {}
        self._used: set[str] = set()
        self._pending: deque[tuple[Any, str, int]] = deque()
        for path, root in roots:
            if isinstance(root, nn.Module):
                for below, module in listings.named_modules(root):
                    self._pending.append((module, f"{path}.{below}" if below else path, 0))
            else:
                self._pending.append((root, path, 0))
        while self._pending and len(self.holders) < _MOST_OBJECTS:
            self._enter(*self._pending.popleft())
        self.names |= self._used

    def _enter(self, value: Any, path: str, depth: int) -> None:
        if id(value) in self.holders or type(value) in PLAIN:
            return
        path = value.__name__ if isinstance(value, type) else path
        self.holders[id(value)] = value, path
        if isinstance(value, torch.Tensor):
            self.places[id(value), None] = _place(value, path, None, None)
            return
        if isinstance(value, FunctionType):
            self._enter_function(value, depth)
        length = len(value) if isinstance(value, list | deque) else None
        if depth < _DEEPEST:
            for key, item, place in self._content(value):
                if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
                    self.places[id(value), key] = _place(item, path + place, key, length)
                if type(item) in PLAIN:
                    self.plain[id(value), key] = PlainValue(item, value, path + place, key)
                elif not isinstance(item, nn.Parameter | ModuleType):
                    self._pending.append((item, path + place, depth + 1))

    def _enter_function(self, function: FunctionType, depth: int) -> None:
        globals_ = function.__globals__
        if not is_framework(globals_.get("__name__")):
            if function not in self.functions:
                self.functions[function] = None
                self._used |= self._names_of(function)
            for name in self._names_of(function) & globals_.keys():
                item, path = globals_[name], f"{globals_.get('__name__')}.{name}"
                if isinstance(item, torch.Tensor):
                    self.places[id(globals_), name] = _place(item, path, name, None)
                if type(item) in PLAIN:
                    self.plain[id(globals_), name] = PlainValue(item, globals_, path, name)
                elif not isinstance(item, ModuleType | nn.Parameter):
                    self._pending.append((item, path, depth + 1))

    def _content(self, value: Any) -> Iterator[tuple[Any, Any, str]]:
        """The content that code may reach: key, object, and its place in a path."""
        if isinstance(value, nn.Module):
            yield from self._content_of_module(value)
        elif isinstance(value, FunctionType):
            yield from ((name, content_of(cell), f"'s variable {name}") for name, cell in variables_of(value))
            yield from (("", getattr(value, "__wrapped__", None), ""),)
        elif isinstance(value, type):
            yield from self._content_of_class(value)
        elif (parts := parts_of(value)) is not None:
            yield from ((position, part, "") for position, part in enumerate(parts))
        elif isinstance(value, weakref.ref):
            yield None, value(), "()"
        elif isinstance(value, ContextVar):
            yield None, value.get(None), ".get()"
        elif isinstance(value, dict):
            if len(value) <= MOST_ITEMS:
                yield from ((key, item, f"[{key!r:.40}]") for key, item in list(value.items()))
        elif isinstance(value, list | tuple | deque):
            if len(value) <= MOST_ITEMS:
                yield from ((position, item, f"[{position}]") for position, item in enumerate(value))
        elif isinstance(value, _OPEN) or not is_framework(type(value).__module__):
            yield from self._content_of_object(value)

    def _content_of_module(self, module: nn.Module) -> Iterator[tuple[Any, Any, str]]:
        yield type(module), type(module), ""
        registries: tuple[dict[str, Any], ...] = (vars(module), module._buffers, module._modules)
        for items in registries:
            is_list = items is module._modules and isinstance(module, _LISTS)
            for name in items if is_list else sorted(items.keys() & self.names - OF_MODULES):
                yield name, items[name], f".{name}"
        if "forward" in vars(module):
            yield "forward", vars(module)["forward"], ".forward"
        for hooks in HOOKS:
            for number, hook in vars(module).get(hooks, {}).items():
                yield (hooks, number), hook, f".{hooks}"

    def _content_of_class(self, cls: type) -> Iterator[tuple[Any, Any, str]]:
        for base in cls.__mro__:
            if not is_framework(base.__module__):
                for name, item in list(vars(base).items()):
                    is_special = name.startswith("__") and name.endswith("__")
                    if name == "forward" or (is_special and name == "__call__") or self._is_reached(name):
                        yield (base, name), item, f".{name}"

    def _content_of_object(self, value: Any) -> Iterator[tuple[Any, Any, str]]:
        if isinstance(value, PreTrainedConfig):
            return
        yield type(value), type(value), ""
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            is_open = isinstance(value, UserDict | UserList)
            yield from (
                (name, item, f".{name}") for name, item in list(attributes.items()) if is_open or self._is_reached(name)
            )
        for slot in slots_of(type(value)):
            if self._is_reached(slot) and (item := getattr(value, slot, MISSING)) is not MISSING:
                yield slot, item, f".{slot}"

    def _is_reached(self, name: str) -> bool:
        return name in self.names


def _place(tensor: torch.Tensor, path: str, key: Any, length: int | None) -> TensorPlace:
    return TensorPlace(tensor, -1 if tensor.is_inference() else tensor._version, path, key, length)


def runs_user_code(modules: Iterable[nn.Module]) -> bool:
    """Return whether a class, a replaced forward or a hook of ``modules`` is of neither torch nor transformers."""
    classes = set()
    for module in modules:
        attributes = vars(module)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or "forward" in attributes:
            return True
        classes.add(type(module))
    return any(not is_framework(base.__module__) for cls in classes for base in cls.__mro__)
