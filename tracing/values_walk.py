"""One pass over the plain values that the code of a spine can read, and the places to look at for a change of them."""

import enum
import functools
import operator
import os
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
from torch import nn
from transformers import PreTrainedConfig

from nxdpp.tracing.code_names import is_framework, names_in
from nxdpp.tracing.object_state import PLAIN, content_of, member_key, slots_of
from nxdpp.tracing.put_back import MISSING
from nxdpp.tracing.reachable_state import ReachableState
from nxdpp.tracing.state_walk import ANY_ATTRIBUTE, MOST_ITEMS, OF_MODULES

# By path: the name under which code knows the value, or None where any code may read it, and a key of the value.
Values = dict[str, tuple[str | None, Any]]

_DEEPEST = 8
_MOST_OBJECTS = 2_000
_MOST_BYTES = 1 << 12
# Objects that cannot change, with a text that has all of their content.
_SHOWN = (enum.Enum, range, slice, Fraction, Decimal, PurePath, date, time, timedelta, numpy.generic)
_OPEN = (SimpleNamespace, Namespace, UserDict, UserList, PreTrainedConfig)
_ENTERED = (Mapping, list, tuple, deque, ContextVar, functools.partial, MethodType)

_OF_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})


class Place:
    """Values that are read in one go: the entries of a dict, the items of a list, a cell."""

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read = read
        self._before = [_kept(value) for value in read()]

    def is_same(self) -> bool:
        """Return whether all values are those of before, by identity, or by value where they are plain."""
        now, before = self._read(), self._before
        if len(now) != len(before):
            return False
        return all(map(operator.is_, now, before)) or all(map(_is_equal, now, before))


class _Other(NamedTuple):
    """A value of which the class alone matters, such as a tensor; it is not kept alive."""

    type: type


class _Content(NamedTuple):
    """Content that may change in place."""

    content: Any


class _Role(enum.Enum):
    """The way in which values of a class are compared."""

    BY_TEXT = enum.auto()
    SET = enum.auto()
    ARRAY = enum.auto()
    FUNCTION = enum.auto()
    BY_IDENTITY = enum.auto()
    HOLDS_OTHERS = enum.auto()
    BY_CLASS = enum.auto()


_ROLES: dict[type, _Role] = {}


def _role(cls: type) -> _Role:
    if cls not in _ROLES:
        _ROLES[cls] = _role_of(cls)
    return _ROLES[cls]


def _role_of(cls: type) -> _Role:
    if cls in PLAIN or issubclass(cls, _SHOWN):
        return _Role.BY_TEXT
    if issubclass(cls, set | frozenset):
        return _Role.SET
    if issubclass(cls, numpy.ndarray):
        return _Role.ARRAY
    if issubclass(cls, FunctionType):
        return _Role.FUNCTION
    if issubclass(cls, nn.Module | type) or cls is type(MISSING):
        return _Role.BY_IDENTITY
    is_open = issubclass(cls, _OPEN) or not is_framework(cls.__module__)
    return _Role.HOLDS_OTHERS if is_open or issubclass(cls, _ENTERED) else _Role.BY_CLASS


def _kept(value: Any) -> Any:
    """``value``, or its description where it may change in place, or where code of the user reads nothing of it."""
    role = _role(type(value))
    if role is _Role.SET:
        return _Content(frozenset(member_key(item) for item in value))
    if role is _Role.ARRAY and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
        return _Content((value.shape, value.dtype, value.tobytes()))
    return _Other(type(value)) if role in (_Role.BY_CLASS, _Role.ARRAY) else value


def _key(kept: Any) -> Any:
    """A key, equal for values that code cannot tell apart by their class and their plain content."""
    if type(kept) in (_Other, _Content):
        return kept
    role = _role(type(kept))
    if role is _Role.BY_TEXT:
        return type(kept), repr(kept)
    if role is _Role.FUNCTION:
        return kept.__code__
    return kept if role is _Role.BY_IDENTITY else _Other(type(kept))


def _is_equal(value: Any, before: Any) -> bool:
    if value is before:
        return True
    if type(before) is _Other:
        return type(value) is before.type
    kept = _kept(value)
    if type(before) is _Content:
        return bool(kept == before)
    # Another object may hold other values.
    return _role(type(before)) is _Role.BY_TEXT and bool(_key(kept) == _key(before))


def _answers_itself(value: Any) -> bool:
    """Return whether a class of the user looks its attributes up, in others."""
    own = (cls for cls in type(value).__mro__ if not is_framework(cls.__module__))
    return any("__getattr__" in vars(cls) or "__getattribute__" in vars(cls) for cls in own)


def walk(spine: Sequence[nn.Module], state: ReachableState | None) -> tuple[Values, list[Place]]:
    """Return the plain values that code of ``spine`` can read, and their places.

    Without a ``state``, which code of the user has, these are the values of configurations and plain attributes.
    """
    found = _Walk(set() if state is None else state.names)
    for number, module in enumerate(spine):
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            found.visit(config, f"{number}.config", None, 0)
        if state is None:
            plain = [n for n, value in vars(module).items() if type(value) in PLAIN and n not in OF_MODULES]
            found.enter_items(vars(module), plain, f"{number}", 0, by_all=True)
        else:
            found.enter_object(module, f"{number}", "forward", 0)
    if state is not None:
        for leaf, path, name in state.of_leaves:
            found.enter_items(vars(leaf), [name], path.rpartition(".")[0], 0)
        for function in state.functions:
            found.enter_function(function)
    found.finish()
    return found.values, found.places


class _Walk:
    def __init__(self, names: set[str]) -> None:
        self.values: Values = {}
        self.places: list[Place] = []
        self._names = names
        self._all = bool(names & ANY_ATTRIBUTE)
        self._seen: dict[int, Any] = {}
        self._pending: deque[tuple[Any, str, str | None, int]] = deque()

    def finish(self) -> None:
        """Enter the objects that are still to be entered."""
        while self._pending and len(self._seen) < _MOST_OBJECTS:
            self._enter(*self._pending.popleft())

    def visit(self, value: Any, path: str, name: str | None, depth: int) -> None:
        """Note ``value``; enter it later if it holds others."""
        self.values[path] = (None if self._all else name, _key(_kept(value)))
        is_entered = _role(type(value)) is _Role.HOLDS_OTHERS or isinstance(value, type)
        if is_entered and id(value) not in self._seen and depth < _DEEPEST:
            self._seen[id(value)] = value
            self._pending.append((value, path, name, depth + 1))

    def enter_function(self, function: FunctionType) -> None:
        """Note the globals, defaults and variables that ``function`` names."""
        globals_ = function.__globals__
        used = sorted(names_in(function.__code__))
        path = f"{globals_.get('__name__')}"
        if _OF_ENVIRONMENT & set(used):
            self._enter_environment()
        self.enter_items(globals_, [name for name in used if name in globals_], path, 0)
        for name in used:
            module = globals_.get(name)
            if isinstance(module, ModuleType) and not is_framework(module.__name__):
                self.enter_items(vars(module), [n for n in used if n in vars(module)], module.__name__, 0)
        called = f"{path}.{function.__qualname__}"
        self._enter_sequence(lambda: function.__defaults__ or (), f"{called} (default)", function.__name__, 0)
        for holder in (function.__kwdefaults__ or {}, vars(function)):
            self.enter_items(holder, list(holder), called, 0)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._enter_sequence(functools.partial(_content_of, cell), f"{called}'s {name}", name, 0)

    def enter_object(self, value: Any, path: str, name: str | None, depth: int) -> None:
        """Note the attributes of ``value`` that code names, and those of its class."""
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.places.append(Place(lambda: (len(attributes),)))
            is_config = isinstance(value, PreTrainedConfig)
            takes_all = self._all or is_config or isinstance(value, UserDict | UserList) or _answers_itself(value)
            names = [n for n in attributes if takes_all or n in self._names]
            if isinstance(value, nn.Module):
                names = [n for n in names if n not in OF_MODULES or n == "training"]
            self.enter_items(attributes, names, path, depth, is_config)
        for slot in slots_of(type(value)):
            if self._all or slot in self._names:
                self._enter_sequence(functools.partial(_slot_of, value, slot), f"{path}.{slot}", slot, depth)
        self._enter_class(type(value), depth)

    def enter_items(
        self, items: Mapping[Any, Any], names: Iterable[Any], path: str, depth: int, by_all: bool = False
    ) -> None:
        """Note the values of ``items`` under ``names``."""
        names = list(names)
        self.places.append(Place(lambda: [items.get(name, MISSING) for name in names]))
        for name in names:
            self.visit(items[name], f"{path}.{name}", None if by_all else name, depth)

    def _enter_environment(self) -> None:
        """Note all variables of the environment: code may compute their names."""
        variables = getattr(os.environ, "_data", os.environ)  # without decoding them
        self.places.append(Place(lambda: [*variables, *variables.values()]))
        self.values["os.environ"] = (None, tuple(variables.items()))

    def _enter_class(self, cls: type, depth: int) -> None:
        for base in cls.__mro__:
            if is_framework(base.__module__) or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            named = [n for n in vars(base) if n in self._names and not n.startswith("__")]
            self.enter_items(vars(base), named, f"{base.__module__}.{base.__qualname__}", depth)

    def _enter_sequence(self, read: Callable[[], Sequence[Any]], path: str, name: str | None, depth: int) -> None:
        self.places.append(Place(read))
        for position, item in enumerate(read()):
            self.visit(item, f"{path}[{position}]", name, depth)

    def _enter(self, value: Any, path: str, name: str | None, depth: int) -> None:
        if isinstance(value, Mapping):
            self._enter_mapping(value, path, name, depth)
        elif isinstance(value, list | tuple | deque):
            if len(value) <= MOST_ITEMS:
                self._enter_sequence(lambda: value, path, name, depth)
        elif isinstance(value, ContextVar):
            self._enter_sequence(lambda: (value.get(MISSING),), f"{path}.get()", name, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.visit(part, f"{path} (partial)", name, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__self__, f"{path}'s object", name, depth)
        elif isinstance(value, type):
            self._enter_class(value, depth)
            return
        if isinstance(value, _OPEN) or not is_framework(type(value).__module__):
            self.enter_object(value, path, name, depth)

    def _enter_mapping(self, value: Mapping[Any, Any], path: str, name: str | None, depth: int) -> None:
        if len(value) > MOST_ITEMS:
            return
        self.places.append(Place(lambda: list(value)))
        self.places.append(Place(lambda: list(value.values())))
        for position, (key, item) in enumerate(list(value.items())):
            shown = repr(key) if type(key) in PLAIN or type(key) is tuple else f"key {position}"
            self.visit(item, f"{path}[{shown}]", name, depth)


def _content_of(cell: CellType) -> tuple[Any]:
    return (content_of(cell),)


def _slot_of(value: Any, slot: str) -> tuple[Any]:
    return (getattr(value, slot, MISSING),)
