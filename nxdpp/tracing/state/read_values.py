"""Values that code of the spine reads, also in globals and configurations: a graph belongs to them.

A loss weight may change between two steps (``model.beta = 0.1``, ``CONFIG["beta"] = 0.1``). The trace reads it, so
another value needs another graph. A step compares only the places that the walk over the values has noted::

    walk     spine module ── cfg ── loss ── beta = 0.1      globals of the user's functions
    places   (vars(module), cfg)   (vars(cfg), loss)   (vars(loss), beta)
"""

import enum
import functools
import logging
import operator
import os
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import count
from pathlib import PurePath
from types import FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from transformers import PreTrainedConfig

from nxdpp.tracing.code.names import is_framework, names_in
from nxdpp.tracing.code.reads import is_read
from nxdpp.tracing.state.object_state import PLAIN, member_key
from nxdpp.tracing.state.reachable_state import ReachableState
from nxdpp.tracing.state.settings import Same
from nxdpp.tracing.state.state_walk import MOST_ITEMS, OF_MODULES, Leaves, StateWalk

# By path: the name under which code knows the value, or None where any code may read it, and a key of the value.
Values = dict[str, tuple[str | None, Any]]

_MOST_BYTES = 1 << 16
# Objects that cannot change, with a text that has all of their content.
_SHOWN = (enum.Enum, range, slice, Fraction, Decimal, PurePath, date, time, timedelta, numpy.generic)
_OPEN = (SimpleNamespace, Namespace, UserDict, UserList, PreTrainedConfig)
_CONTAINERS = (dict, MappingProxyType, list, tuple, deque)
_ENTERED = (*_CONTAINERS, ContextVar, functools.partial, MethodType)

# Objects that are compared as a whole: a different one may compute different values.
_WHOLE = (nn.Module, torch.Tensor, type, FunctionType)

_OF_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})


class _Summary(NamedTuple):
    """The class of a value, and content that may change in place."""

    type: type
    content: Any = None


def _role(cls: type) -> str:
    """The way in which values of a class are compared."""
    if cls in PLAIN or issubclass(cls, _SHOWN):
        return "text"
    if issubclass(cls, set | frozenset):
        return "set"
    if issubclass(cls, numpy.ndarray):
        return "array"
    is_open = issubclass(cls, (*_OPEN, *_ENTERED)) or not is_framework(cls.__module__)
    return "content" if is_open and not issubclass(cls, _WHOLE) else "identity"


def kept(value: Any) -> Any:
    """``value``, or its description where it may change in place."""
    role = _role(type(value))
    if role == "set":
        return _Summary(type(value), frozenset(member_key(item) for item in value))
    if role == "array" and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
        return _Summary(type(value), (value.shape, value.dtype, value.tobytes()))
    return value


def _key(kept: Any) -> Any:
    """A key, equal for the same object, and for values that code cannot tell apart by their plain content."""
    if type(kept) is _Summary:
        return kept
    role = _role(type(kept))
    if role == "text":
        return type(kept), repr(kept)
    if role != "content":
        return Same(kept)
    return _Summary(type(kept), tuple(kept.keywords) if isinstance(kept, functools.partial) else None)


def is_equal(value: Any, before: Any) -> bool:
    """Return whether ``value`` is the one that ``kept`` gave ``before`` for, or an equal plain one."""
    if value is before:
        return True
    if type(before) is _Summary:
        return bool(kept(value) == before)
    # Another object may hold other values.
    return _role(type(before)) == "text" and bool(_key(kept(value)) == _key(before))


class ValuesWalk(StateWalk):
    """One pass over the plain ``values`` that code of ``spine`` can read.

    Without a ``state``, which code of the user has, these are the values of configurations and plain attributes.
    ``objects`` are tensors and other whole objects that code may read. The stages of a graph may hold them. ``reads``
    are calls that read the places to look at for a change of them.
    """

    def __init__(self, spine: Sequence[nn.Module], state: ReachableState | None) -> None:
        self.values: Values = {}
        self.objects: set[tuple[str, str | None, Same]] = set()
        self.reads: list[Callable[[], Sequence[Any]]] = []
        self._state = state
        super().__init__(spine, set() if state is None else state.names, () if state is None else state.of_leaves)

    def _visit_roots(self, spine: Sequence[nn.Module], of_leaves: Leaves) -> None:
        for number, module in enumerate(spine):
            config = vars(module).get("config")
            if isinstance(config, PreTrainedConfig):
                self._visit(config, f"{number}.config", None, 0)
            if self._state is None:
                plain = [n for n, value in vars(module).items() if type(value) in PLAIN and n not in OF_MODULES]
                self._note_names(vars(module), plain)
                for name in plain:
                    self._visit(vars(module)[name], f"{number}.{name}", None, 0)
            else:
                self._enter_object(module, f"{number}", "forward", 0)
        for leaf, path, name in of_leaves:
            self._note_names(vars(leaf), [name])
            self._visit(vars(leaf)[name], path, name, 0)
        for function in () if self._state is None else self._state.functions:
            self._enter_function(function, f"{function.__module__}.{function.__qualname__}", 0)
            if _OF_ENVIRONMENT & names_in(function):
                # All of it: code may compute the names of variables.
                self.reads.append(lambda: [*os.environ, *os.environ.values()])
                self.values["os.environ"] = (None, tuple(os.environ.items()))

    def _visit(self, value: Any, path: str, name: str | None, depth: int) -> None:
        self.kept.append(value)
        known, key = None if self._all else name, _key(kept(value))
        is_entered = _role(type(value)) == "content" or isinstance(value, type)
        if is_entered and id(value) not in self._seen:
            is_large = isinstance(value, _CONTAINERS) and len(value) > MOST_ITEMS
            if is_large or not self._enter_later(value, path, name, depth):
                key = Same(value)
        self.values[path] = known, key
        if isinstance(key, Same) and not isinstance(value, FunctionType):
            self.objects.add((path, known, key))

    def _note(self, read: Callable[[], Sequence[Any]], restore: Callable[[], Any]) -> None:
        self.reads.append(read)

    def _takes_all_of(self, value: Any) -> bool:
        return isinstance(value, PreTrainedConfig)


_logger = logging.getLogger(__name__)

# So many values of the settings are remembered.
_MOST_KNOWN = 256
_MANY = 20


class ReadPlace:
    """Values that are read in one go: the entries of a dict, the items of a list, a cell."""

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read = read
        self._before = [kept(value) for value in read()]

    def is_same(self) -> bool:
        """Return whether all values are as before, by identity, or by value where they are plain."""
        now, before = self._read(), self._before
        if len(now) != len(before):
            return False
        return all(map(operator.is_, now, before)) or all(map(is_equal, now, before))


class ReadValues:
    """The plain values that the code of a spine reads, now and before.

    ``find_state`` finds the state that code of the user in the spine can reach; ``None`` without such code. ``objects``
    are tensors and other whole objects that the code read when ``number`` was last asked for.
    """

    def __init__(self, spine: Sequence[nn.Module], find_state: Callable[[], ReachableState | None]) -> None:
        self._spine = spine
        self._find_state = find_state
        self._places: list[ReadPlace] = []
        self._values: Values = {}
        self.objects: frozenset[Any] = frozenset()
        self._known: dict[frozenset[tuple[str, Any]], int] = {}
        self._unread: set[str | None] = set()
        self._counter = count()
        self._number = -1

    @property
    def number(self) -> int:
        """A number for the present values, equal for equal ones."""
        if self._number < 0 or not all(place.is_same() for place in self._places):
            self._look()
        return self._number

    def _look(self) -> None:
        state = self._find_state()
        found = ValuesWalk(self._spine, state)
        values, self._places = found.values, [ReadPlace(read) for read in found.reads]
        if state is not None:
            self._find_unread(values, state)
        self.objects = frozenset(each for each in found.objects if each[1] not in self._unread)
        before, self._values = self._values, values
        content = self._read_part(values.items())
        number = self._known.pop(content, None)
        if number is None:
            number = next(self._counter)
            if number == _MANY:
                self._warn(before)
        self._number = number
        self._known[content] = self._number
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _find_unread(self, values: Values, state: ReachableState) -> None:
        """Find names of changed values that no code reads: a counter, for example."""
        changed = {value[0] for path, value in values.items() if self._values.get(path, value) != value}
        names = {name for name in changed - self._unread if name is not None and not is_read(name, state.functions)}
        if names:
            self._unread |= names
            self._known = {self._read_part(content): number for content, number in self._known.items()}

    def _read_part(self, values: Iterable[tuple[str, Any]]) -> frozenset[tuple[str, Any]]:
        return frozenset((path, value) for path, value in values if value[0] not in self._unread)

    def _warn(self, before: Values) -> None:
        changed = [path for path, value in self._values.items() if before.get(path) != value]
        _logger.warning(
            "forward reads values that have changed %d times (last %s); each one is traced anew, which takes longer "
            "than a step. Give a number that changes often to forward as an input.",
            _MANY,
            ", ".join(changed[:3]) or "a missing one",
        )
