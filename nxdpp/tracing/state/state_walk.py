"""One pass over the Python objects that code of the spine can reach."""

import functools
import operator
import threading
import weakref
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import fx, nn
from transformers import PreTrainedConfig

from nxdpp.ground.torch_names import FORWARD_HOOKS, FORWARD_PRE_HOOKS, VERSION
from nxdpp.tracing.code.names import is_framework, names_in, parts_of, variables_of
from nxdpp.tracing.state import object_state
from nxdpp.tracing.state.object_state import MISSING, PLAIN, counters

_DEEPEST = 8
_MOST_OBJECTS = 10_000
# Items of a larger container are not looked at.
MOST_ITEMS = 1_000
_MOST_BYTES = 1 << 20
# Names with which code may reach attributes whose names it does not hold.
ANY_ATTRIBUTE = frozenset({"getattr", "setattr", "delattr", "vars", "__dict__", "attrgetter"})
HOOKS = (FORWARD_PRE_HOOKS.name, FORWARD_HOOKS.name)
# Attributes of every module; their content is the tracer's business.
OF_MODULES = frozenset(vars(nn.Module()))
Leaves = Iterable[tuple[nn.Module, str, str]]
"""Modules outside of the spine, each with the path and the name of an attribute."""
NamesOf = Callable[[FunctionType], AbstractSet[str]]
"""A function that gives the names in the code of another one."""


class StateWalk:
    """One pass over the objects that the code of the modules ``spine`` can reach by ``names``.

    ``of_leaves`` has attributes of other modules, each as module, path and name. ``names_of`` gives the names that the
    code of a function uses. The pass finds ``functions`` of the user, ``caches`` (``functools.lru_cache``), ``keys`` of
    the content of each place by path and name, and ``traced`` values with their paths. ``undo`` has calls that put the
    content of all objects back. ``kept`` has all objects: no other object gets the id of one of them.
    """

    def __init__(
        self, spine: Sequence[nn.Module], names: AbstractSet[str], of_leaves: Leaves = (), names_of: NamesOf = names_in
    ) -> None:
        self.functions: dict[FunctionType, None] = {}
        self.caches: list[Any] = []
        self.keys: dict[tuple[str, str | None], Any] = {}
        self.undo: list[Callable[[], Any]] = []
        self.kept: list[Any] = []
        self.traced: dict[fx.Proxy, str] = {}
        self._names = names
        self._names_of = names_of
        self._all = bool(names & ANY_ATTRIBUTE)
        self._spine = {id(module) for module in spine}
        self._classes = {cls for module in spine for cls in type(module).__mro__}
        self._seen: dict[int, str] = {}
        self._pending: deque[tuple[Any, str, str | None, int]] = deque()
        # The object whose content is visited, and its path.
        self._owner: Any = None
        self._owner_path = ""
        self._visit_roots(spine, of_leaves)
        while self._pending:
            self._owner, self._owner_path, *_ = entered = self._pending.popleft()
            self._enter(*entered)

    def restore(self) -> None:
        """Put the content of all objects back, as it was in this pass."""
        for undo in reversed(self.undo):
            undo()

    def _visit_roots(self, spine: Sequence[nn.Module], of_leaves: Leaves) -> None:
        for module in spine:
            self._visit(module, type(module).__name__, type(module).__name__, 0)
        for leaf, path, name in of_leaves:
            if not isinstance(vars(leaf).get(name), torch.Tensor | nn.Module):
                self._visit(vars(leaf).get(name), path, name, 0)

    def _visit(self, value: Any, path: str, name: str | None, depth: int) -> None:
        """Note ``value`` at ``path``, and enter it later."""
        self.kept.append(value)
        if isinstance(value, fx.Proxy):
            self.traced.setdefault(value, path)
            self.keys[path, name] = "a traced value"
        elif isinstance(value, torch.Tensor):
            self.keys[path, name] = ("a tensor", id(value), -1 if value.is_inference() else VERSION.of(value))
        elif type(value) in PLAIN:
            # NaN is equal to itself here, and 1 is not True.
            self.keys[path, name] = (type(value), repr(value) if type(value) in (float, complex) else value)
        elif isinstance(value, object_state.ITERATORS):
            self.keys[path, name] = (type(value), repr(object_state.iterator_state(value)))
        elif id(value) in self._seen:
            self.keys[path, name] = ("also", self._seen[id(value)])
        else:
            self._enter_later(value, path, name, depth)

    def _enter_later(self, value: Any, path: str, name: str | None, depth: int) -> bool:
        """Enter ``value`` later; return ``False`` for one that is too deep, or one too many."""
        if depth >= _DEEPEST or len(self._seen) >= _MOST_OBJECTS:
            return False
        self._seen[id(value)] = path
        self._pending.append((value, path, name, depth + 1))
        return True

    def _enter(self, value: Any, path: str, name: str | None, depth: int) -> None:
        if isinstance(value, nn.Module):
            self._enter_module(value, path, name, depth)
        elif isinstance(value, FunctionType):
            self._enter_function(value, path, depth)
        elif isinstance(value, type):
            self._enter_class(value, path, depth)
        elif (parts := parts_of(value)) is not None:
            for position, part in enumerate(parts):
                self._visit(part, f"{path} ({position})" if position else path, name, depth)
        elif isinstance(value, BuiltinMethodType):
            if not isinstance(value.__self__, ModuleType | type):
                self._visit(value.__self__, path, name, depth)
        elif isinstance(value, object_state.CachedFunction):
            if not is_framework(getattr(value, "__module__", None)):
                self.caches.append(value)
                self._visit(value.__wrapped__, path, name, depth)
        elif isinstance(value, weakref.ref):
            self._visit(value(), f"{path}()", name, depth)
        elif isinstance(value, ContextVar):
            content = value.get(MISSING)
            self._note(lambda: (value.get(MISSING),), functools.partial(object_state.set_variable, value, content))
            if content is not MISSING:
                self._visit(content, f"{path}.get()", name, depth)
        elif isinstance(value, threading.local):
            self._note_items(vars(value), list(vars(value)))
            self.keys[path, name] = (type(value),)
            self._visit_items(vars(value), f"{path}.", "", depth)
        elif (found := object_state.generator_state(value)) is not None:
            state, undo = found
            self.keys[path, name] = ("a generator", type(value), state)
            if undo is not None:
                self.undo.append(undo)
        else:
            self._enter_data(value, path, name, depth)

    def _enter_module(self, module: nn.Module, path: str, name: str | None, depth: int) -> None:
        if id(module) in self._spine:
            self._enter_object(module, path, name, depth)
        else:
            self.keys[path, name] = (type(module), id(module))

    def _runs(self, cls: type[nn.Module]) -> bool:
        """Return whether code of the class of a module is walked. The trace does not run the code of layers."""
        return cls in self._classes

    def _enter_function(self, function: FunctionType, path: str, depth: int) -> None:
        globals_ = function.__globals__
        is_own = not is_framework(globals_.get("__name__"))
        if is_own:
            self.functions[function] = None
            names = self._names_of(function)
            self._note_names(globals_, names)
            for name in names & globals_.keys():
                self._visit_global(globals_[name], f"{globals_.get('__name__')}.{name}", name, names, depth)
            for position, value in enumerate(function.__defaults__ or ()):
                self._visit(value, f"{path} (default {position})", function.__name__, depth)
            self._visit_items(function.__kwdefaults__ or {}, f"{path} (default ", ")", depth)
            for items in (vars(function), function.__kwdefaults__ or {}):
                self._note_items(items, list(items))
            restore = functools.partial(setattr, function, "__defaults__", function.__defaults__)
            self._note(lambda: function.__defaults__ or (), restore)
            self._visit_items(vars(function), f"{path}.", "", depth)
        elif "__wrapped__" in vars(function):
            self._visit(vars(function)["__wrapped__"], path, function.__name__, depth)
        for name, cell in variables_of(function):
            content = object_state.content_of(cell)
            # A decorator of a framework holds the function of the user.
            if content is not MISSING and (is_own or isinstance(content, FunctionType | MethodType)):
                self._note(
                    functools.partial(_attribute, cell, "cell_contents"),
                    functools.partial(setattr, cell, "cell_contents", content),
                )
                self._visit(content, f"{function.__name__}'s variable {name}", name, depth)

    def _visit_global(self, value: Any, path: str, name: str, names: AbstractSet[str], depth: int) -> None:
        if not isinstance(value, ModuleType):
            self._visit(value, path, name, depth)
        elif not is_framework(value.__name__):
            self._note_names(vars(value), names)
            for attribute in names & vars(value).keys():
                member = vars(value)[attribute]
                if not isinstance(member, ModuleType):
                    self._visit(member, f"{value.__name__}.{attribute}", attribute, depth)

    def _enter_class(self, cls: type, path: str, depth: int) -> None:
        for base in cls.__mro__:
            if is_framework(base.__module__):
                continue
            runs = not issubclass(base, nn.Module) or self._runs(base)
            own = {
                name: value
                for name, value in vars(base).items()
                if (name in self._names or name.startswith("__")) and self._is_reached(name, value, runs)
            }
            data = {name: value for name, value in own.items() if not isinstance(value, FunctionType)}
            names = [name for name in own if not name.startswith("__")]
            restore = functools.partial(object_state.set_class, base, dict(vars(base)), counters(data), self._names)
            self._note(functools.partial(_items, vars(base), names), restore)
            self._visit_items(own, f"{base.__name__}.", "", depth)

    def _is_reached(self, name: str, value: Any, runs: bool) -> bool:
        """Return whether code may use an attribute of a class. Python itself calls special methods."""
        is_code = isinstance(value, FunctionType | property | classmethod | staticmethod | functools.cached_property)
        if is_code and not runs:
            return False
        if name.startswith("__") and name.endswith("__"):
            return isinstance(value, FunctionType) and name not in ("__init__", "__repr__", "__setstate__")
        return name in self._names

    def _enter_data(self, value: Any, path: str, name: str | None, depth: int) -> None:
        """Note a container, an array or an object, and visit its content."""
        if isinstance(value, dict):
            restore = functools.partial(object_state.set_dict, value, dict(value), counters(value))
            self._note(lambda: [*value, *value.values()], restore)
            self._visit_mapping(value, path, name, depth)
        elif isinstance(value, list | deque):
            self._note(lambda: value, functools.partial(object_state.set_list, value, list(value)))
            self._visit_sequence(value, path, name, depth)
        elif isinstance(value, MappingProxyType):
            self._visit_mapping(value, path, name, depth)
        elif isinstance(value, tuple):
            self._visit_sequence(value, path, name, depth)
        elif isinstance(value, set | frozenset):
            if isinstance(value, set):
                self.undo.append(functools.partial(object_state.set_set, value, set(value)))
            self.keys[path, name] = (type(value), frozenset(object_state.member_key(item) for item in value))
        elif isinstance(value, numpy.ndarray):
            if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
                self.undo.append(functools.partial(operator.setitem, value, ..., value.copy()))
                self.keys[path, name] = ("an array", value.shape, value.dtype, value.tobytes())
        else:
            self._enter_object(value, path, name, depth)
            return
        if not is_framework(type(value).__module__):
            self._enter_object(value, path, name, depth)

    def _visit_mapping(self, value: Mapping[Any, Any], path: str, name: str | None, depth: int) -> None:
        # A key that is a traced value is a different object in each run.
        items = [(key, item) for key, item in value.items() if not object_state.holds_proxy(key)]
        self.keys[path, name] = (type(value), len(items))
        if len(items) <= MOST_ITEMS:
            for position, (key, item) in enumerate(items):
                shown = repr(key) if type(key) in PLAIN or type(key) is tuple else f"key {position}"
                self._visit(item, f"{path}[{shown}]", name, depth)

    def _visit_sequence(self, value: Any, path: str, name: str | None, depth: int) -> None:
        self.keys[path, name] = (type(value), len(value))
        if len(value) <= MOST_ITEMS:
            for position, item in enumerate(value):
                self._visit(item, f"{path}[{position}]", name, depth)

    def _enter_object(self, value: Any, path: str, name: str | None, depth: int) -> None:
        """Note the attributes of an object of the user, and visit the ones that code may name."""
        is_known = isinstance(value, nn.Module | SimpleNamespace | Namespace | UserDict | UserList | PreTrainedConfig)
        if isinstance(value, ModuleType) or (is_framework(type(value).__module__) and not is_known):
            return
        self._visit(type(value), type(value).__name__, name, depth)
        self.keys.setdefault((path, name), (type(value),))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            takes_all = self._all or isinstance(value, UserDict | UserList) or _answers_itself(value)
            names = [n for n in attributes if takes_all or n in self._names or self._takes_all_of(value)]
            if isinstance(value, nn.Module):
                names = [n for n in names if n not in OF_MODULES]
                for hooks in HOOKS:
                    for hook in attributes.get(hooks, {}).values():
                        self._visit(hook, f"{path}.{hooks}", hooks, depth)
            self._note_items(attributes, names)
            for attribute in names:
                known = None if self._takes_all_of(value) else attribute
                self._visit(attributes[attribute], f"{path}.{attribute}", known, depth)
        for slot in object_state.slots_of(type(value)):
            content = getattr(value, slot, MISSING)
            if content is not MISSING:
                read = functools.partial(_attribute, value, slot)
                self._note(read, functools.partial(object_state.set_attribute, value, slot, content))
                if self._all or slot in self._names:
                    self._visit(content, f"{path}.{slot}", slot, depth)

    def _visit_items(self, items: Mapping[str, Any], before: str, after: str, depth: int) -> None:
        for name, value in items.items():
            self._visit(value, f"{before}{name}{after}", name, depth)

    def _takes_all_of(self, value: Any) -> bool:
        """Return whether code may read all attributes of ``value``."""
        return False

    def _note(self, read: Callable[[], Sequence[Any]], restore: Callable[[], Any]) -> None:
        """Note content that may change: a call that reads it, and one that puts it back as it is now."""
        self.undo.append(restore)

    def _note_items(self, items: dict[Any, Any], names: list[str]) -> None:
        """Note a dict, of which code reaches ``names``."""
        restore = functools.partial(object_state.set_dict, items, dict(items), counters(items))
        self._note(lambda: [len(items), *_items(items, names)], restore)

    def _note_names(self, items: dict[str, Any], names: Iterable[str]) -> None:
        old = {name: items.get(name, MISSING) for name in names}
        restore = functools.partial(object_state.set_items, items, old, counters(old))
        self._note(functools.partial(_items, items, list(old)), restore)


def _items(items: Mapping[Any, Any], names: list[Any]) -> list[Any]:
    return [items.get(name, MISSING) for name in names]


def _attribute(value: Any, name: str) -> tuple[Any]:
    try:
        return (getattr(value, name, MISSING),)
    except ValueError:  # the cell is empty
        return (MISSING,)


def _answers_itself(value: Any) -> bool:
    """Return whether a class of the user looks its attributes up, in others."""
    own = (cls for cls in type(value).__mro__ if not is_framework(cls.__module__))
    return any("__getattr__" in vars(cls) or "__getattribute__" in vars(cls) for cls in own)
