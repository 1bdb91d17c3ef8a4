"""One pass over the Python objects that code of the spine can reach."""

import functools
import threading
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from types import (
    BuiltinMethodType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy
import torch
from torch import fx, nn
from transformers import PreTrainedConfig

from nxdpp.tracing.code_names import is_framework, names_in
from nxdpp.tracing.object_state import (
    ITERATORS,
    PLAIN,
    content_of,
    generator_state,
    holds_proxy,
    iterator_state,
    member_key,
    set_variable,
    slots_of,
)
from nxdpp.tracing.put_back import (
    MISSING,
    counters,
    set_array,
    set_attribute,
    set_cell,
    set_class,
    set_dict,
    set_items,
    set_list,
    set_set,
)

_DEEPEST = 8
_MOST_OBJECTS = 10_000
# Items of a larger container are not looked at.
MOST_ITEMS = 1_000
_MOST_BYTES = 1 << 20
# Names with which code may reach attributes whose names it does not hold.
ANY_ATTRIBUTE = frozenset({"getattr", "setattr", "delattr", "vars", "__dict__", "attrgetter"})
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Attributes of every module; their content is the tracer's business.
OF_MODULES = frozenset(vars(nn.Module()))


class StateWalk:
    """One pass over the objects that the code of the modules ``spine`` can reach by the names ``reached``.

    ``of_leaves`` has attributes of other modules, each as module, path and name.

    Attributes:
        functions: functions of the user.
        caches: functions with a cache (``functools.lru_cache``).
        keys: by path and name, a key of the content of each place.
        undo: calls that put the content of all objects back.
        kept: all objects.
        traced: traced values, with their paths.
    """

    def __init__(
        self,
        spine: Iterable[nn.Module],
        reached: AbstractSet[str],
        of_leaves: Iterable[tuple[nn.Module, str, str]] = (),
    ) -> None:
        self.functions: dict[FunctionType, None] = {}
        self.caches: list[Any] = []
        self.keys: dict[tuple[str, str], Any] = {}
        self.undo: list[Callable[[], Any]] = []
        self.kept: list[Any] = []
        self.traced: dict[fx.Proxy, str] = {}
        self._names = reached
        self._all = bool(reached & ANY_ATTRIBUTE)
        self._spine = {id(module) for module in spine}
        self._classes = {cls for module in spine for cls in type(module).__mro__}
        self._seen: dict[int, str] = {}
        self._pending: deque[tuple[Any, str, str, int]] = deque()
        for module in spine:
            self._visit(module, type(module).__name__, type(module).__name__, 0)
        for leaf, path, name in of_leaves:
            if not isinstance(vars(leaf).get(name), torch.Tensor | nn.Module):
                self._visit(vars(leaf).get(name), path, name, 0)
        self._enter_all()

    def _enter_all(self) -> None:
        while self._pending and len(self._seen) < _MOST_OBJECTS:
            self._enter(*self._pending.popleft())

    def _visit(self, value: Any, path: str, name: str, depth: int) -> None:
        """Note ``value`` at ``path``, and enter it later."""
        self.kept.append(value)
        if isinstance(value, fx.Proxy):
            self.traced.setdefault(value, path)
            self.keys[path, name] = "a traced value"
        elif isinstance(value, torch.Tensor):
            self.keys[path, name] = ("a tensor", id(value), -1 if value.is_inference() else value._version)
        elif type(value) in PLAIN:
            # NaN is equal to itself here, and 1 is not True.
            self.keys[path, name] = (type(value), repr(value) if type(value) in (float, complex) else value)
        elif isinstance(value, ITERATORS):
            self.keys[path, name] = (type(value), repr(iterator_state(value)))
        elif id(value) in self._seen:
            self.keys[path, name] = ("also", self._seen[id(value)])
        elif depth < _DEEPEST:
            self._seen[id(value)] = path
            self._pending.append((value, path, name, depth + 1))

    def _enter(self, value: Any, path: str, name: str, depth: int) -> None:
        if isinstance(value, nn.Module):
            if id(value) in self._spine:
                self._enter_object(value, path, name, depth)
            else:
                self.keys[path, name] = (type(value), id(value))
        elif isinstance(value, FunctionType):
            self._enter_function(value, path, depth)
        elif isinstance(value, type):
            self._enter_class(value, path, depth)
        elif isinstance(value, MethodType):
            self._visit(value.__self__, path, name, depth)
            self._visit(value.__func__, path, name, depth)
        elif isinstance(value, BuiltinMethodType):
            if not isinstance(value.__self__, ModuleType | type):
                self._visit(value.__self__, path, name, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, path, name, depth)
        elif isinstance(value, property):
            for accessor in filter(None, (value.fget, value.fset)):
                self._visit(accessor, path, name, depth)
        elif isinstance(value, staticmethod | classmethod):
            self._visit(value.__func__, path, name, depth)
        elif isinstance(value, functools.cached_property):
            self._visit(value.func, path, name, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            if not is_framework(getattr(value, "__module__", None)):
                self.caches.append(value)
                self._visit(value.__wrapped__, path, name, depth)
        elif isinstance(value, ContextVar):
            content = value.get(MISSING)
            self.undo.append(functools.partial(set_variable, value, content))
            if content is not MISSING:
                self._visit(content, f"{path}.get()", name, depth)
        elif isinstance(value, threading.local):
            self._put_back_all(vars(value))
            self.keys[path, name] = (type(value),)
            self._visit_items(vars(value), f"{path}.", "", depth)
        elif (found := generator_state(value)) is not None:
            state, undo = found
            self.keys[path, name] = ("a generator", type(value), state)
            if undo is not None:
                self.undo.append(undo)
        else:
            self._enter_data(value, path, name, depth)

    def _enter_function(self, function: FunctionType, path: str, depth: int) -> None:
        globals_ = function.__globals__
        is_own = not is_framework(globals_.get("__name__"))
        if is_own:
            self.functions[function] = None
            names = [name for name in names_in(function.__code__) if name in globals_]
            self._put_back_items(globals_, names_in(function.__code__))
            for name in names:
                self._visit_global(globals_[name], f"{globals_.get('__name__')}.{name}", name, function, depth)
            for position, value in enumerate(function.__defaults__ or ()):
                self._visit(value, f"{path} (default {position})", function.__name__, depth)
            self._visit_items(function.__kwdefaults__ or {}, f"{path} (default ", ")", depth)
            self._put_back_all(vars(function))
            self._visit_items(vars(function), f"{path}.", "", depth)
        elif "__wrapped__" in vars(function):
            self._visit(vars(function)["__wrapped__"], path, function.__name__, depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            content = content_of(cell)
            # A decorator of a framework holds the function of the user.
            if content is not MISSING and (is_own or isinstance(content, FunctionType | MethodType)):
                self.undo.append(functools.partial(set_cell, cell, content))
                self._visit(content, f"{function.__name__}'s variable {name}", name, depth)

    def _visit_global(self, value: Any, path: str, name: str, function: FunctionType, depth: int) -> None:
        if not isinstance(value, ModuleType):
            self._visit(value, path, name, depth)
        elif not is_framework(value.__name__):
            names = names_in(function.__code__)
            self._put_back_items(vars(value), names)
            for attribute in names & vars(value).keys():
                member = vars(value)[attribute]
                if not isinstance(member, ModuleType):
                    self._visit(member, f"{value.__name__}.{attribute}", attribute, depth)

    def _enter_class(self, cls: type, path: str, depth: int) -> None:
        for base in cls.__mro__:
            if is_framework(base.__module__):
                continue
            # The trace does not run the code of layers.
            runs = not issubclass(base, nn.Module) or base in self._classes
            own = {
                name: value
                for name, value in vars(base).items()
                if (name in self._names or name.startswith("__")) and self._is_reached(name, value, runs)
            }
            data = {name: value for name, value in own.items() if not isinstance(value, FunctionType)}
            self.undo.append(functools.partial(set_class, base, dict(vars(base)), counters(data), self._names))
            self._visit_items(own, f"{base.__name__}.", "", depth)

    def _is_reached(self, name: str, value: Any, runs: bool) -> bool:
        """Return whether code may use an attribute of a class. Python itself calls special methods."""
        is_code = isinstance(value, FunctionType | property | classmethod | staticmethod | functools.cached_property)
        if is_code and not runs:
            return False
        if name.startswith("__") and name.endswith("__"):
            return isinstance(value, FunctionType) and name not in ("__init__", "__repr__", "__setstate__")
        return name in self._names

    def _enter_data(self, value: Any, path: str, name: str, depth: int) -> None:
        """Note a container, an array or an object, and visit its content."""
        if isinstance(value, dict):
            self._put_back_all(value)
            self._visit_mapping(value, path, name, depth)
        elif isinstance(value, list):
            self.undo.append(functools.partial(set_list, value, list(value)))
            self._visit_sequence(value, path, name, depth)
        elif isinstance(value, tuple):
            self._visit_sequence(value, path, name, depth)
        elif isinstance(value, deque):
            self.undo.append(functools.partial(set_list, value, list(value)))
            self._visit_sequence(value, path, name, depth)
        elif isinstance(value, set | frozenset):
            if isinstance(value, set):
                self.undo.append(functools.partial(set_set, value, set(value)))
            self.keys[path, name] = (type(value), frozenset(member_key(item) for item in value))
        elif isinstance(value, numpy.ndarray):
            if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
                self.undo.append(functools.partial(set_array, value, value.copy()))
                self.keys[path, name] = ("an array", value.shape, value.dtype, value.tobytes())
        else:
            self._enter_object(value, path, name, depth)
            return
        if not is_framework(type(value).__module__):
            self._enter_object(value, path, name, depth)

    def _visit_mapping(self, value: Mapping[Any, Any], path: str, name: str, depth: int) -> None:
        # A key that is a traced value is another one in each run.
        items = [(key, item) for key, item in value.items() if not holds_proxy(key)]
        self.keys[path, name] = (type(value), len(items))
        if len(items) <= MOST_ITEMS:
            for position, (key, item) in enumerate(items):
                shown = repr(key) if type(key) in PLAIN or type(key) is tuple else f"key {position}"
                self._visit(item, f"{path}[{shown}]", name, depth)

    def _visit_sequence(self, value: Any, path: str, name: str, depth: int) -> None:
        self.keys[path, name] = (type(value), len(value))
        if len(value) <= MOST_ITEMS:
            for position, item in enumerate(value):
                self._visit(item, f"{path}[{position}]", name, depth)

    def _enter_object(self, value: Any, path: str, name: str, depth: int) -> None:
        """Note the attributes of an object of the user, and visit those that code may name."""
        is_known = isinstance(value, nn.Module | SimpleNamespace | Namespace | UserDict | UserList | PreTrainedConfig)
        if isinstance(value, ModuleType) or (is_framework(type(value).__module__) and not is_known):
            return
        self._visit(type(value), type(value).__name__, name, depth)
        self.keys.setdefault((path, name), (type(value),))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._put_back_all(attributes)
            for attribute, content in list(attributes.items()):
                is_reached = self._all or attribute in self._names or isinstance(value, UserDict | UserList)
                if attribute in HOOKS and isinstance(value, nn.Module):
                    for hook in content.values():
                        self._visit(hook, f"{path}.{attribute}", attribute, depth)
                elif is_reached and not (isinstance(value, nn.Module) and attribute in OF_MODULES):
                    self._visit(content, f"{path}.{attribute}", attribute, depth)
        for slot in slots_of(type(value)):
            content = getattr(value, slot, MISSING)
            if content is not MISSING:
                self.undo.append(functools.partial(set_attribute, value, slot, content))
                if self._all or slot in self._names:
                    self._visit(content, f"{path}.{slot}", slot, depth)

    def _visit_items(self, items: Mapping[str, Any], before: str, after: str, depth: int) -> None:
        for name, value in items.items():
            self._visit(value, f"{before}{name}{after}", name, depth)

    def _put_back_all(self, items: dict[Any, Any]) -> None:
        self.undo.append(functools.partial(set_dict, items, dict(items), counters(items)))

    def _put_back_items(self, items: dict[str, Any], names: Iterable[str]) -> None:
        old = {name: items.get(name, MISSING) for name in names}
        self.undo.append(functools.partial(set_items, items, old, counters(old)))
