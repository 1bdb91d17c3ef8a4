"""State of single Python objects, such as generators, cells and dicts, and the ways to put it back as it was."""

import copy
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextvars import Context, ContextVar
from types import CellType, GeneratorType
from typing import Any

import numpy
import torch
from torch import fx

from nxdpp.tracing.code.frames import generator_place
from nxdpp.tracing.code.names import is_framework

MISSING: Any = object()
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device, torch.layout)
ITERATORS: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    enumerate,
    zip,
)
# The class of functions with ``functools.cache``.
CachedFunction = type(functools.cache(len))


def generator_state(value: Any) -> tuple[Any, Callable[[], Any] | None] | None:
    """Return the state of a random generator, or of a generator of Python, and a call that puts it back, if any.

    Return ``None`` for other objects, and for generators without a state.
    """
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, random.Random):
        state = value.getstate()
        return state, functools.partial(value.setstate, state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return repr(bits.state), functools.partial(setattr, bits, "state", bits.state)
    if isinstance(value, numpy.random.RandomState):
        legacy = value.get_state()
        key = repr((legacy[1].tobytes(), legacy[2:])) if isinstance(legacy, tuple) else repr(legacy)
        return key, functools.partial(value.set_state, legacy)
    if isinstance(value, torch.Generator):
        tensor = value.get_state()
        return tensor.numpy().tobytes(), functools.partial(value.set_state, tensor)
    if isinstance(value, GeneratorType):
        return _state_of(value), None
    return None


def iterator_state(value: Any) -> Any:
    """Return the state of one of ``ITERATORS``; empty where a part of it cannot be described."""
    try:
        return value.__reduce__()[1:]
    except TypeError:
        return ()


def _state_of(generator: Any) -> Any:
    """The place and the plain variables of a generator. Python cannot put them back."""
    found = generator_place(generator)
    return None if found is None else (found[0], repr([(n, v) for n, v in found[1].items() if type(v) in PLAIN]))


def set_variable(variable: ContextVar[Any], content: Any) -> None:
    """Set ``variable`` to ``content``; ``MISSING`` stands for no value of its own."""
    if content is MISSING:
        # A variable cannot lose its value again; it gets the value of an empty context.
        try:
            content = Context().run(variable.get)
        except LookupError:
            content = None
    variable.set(content)


def content_of(cell: CellType) -> Any:
    """The content of a cell, or ``MISSING``."""
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return MISSING


def slots_of(cls: type) -> list[str]:
    """Names of the slots that the user's classes among ``cls`` and its bases have."""
    slots = [vars(base).get("__slots__", ()) for base in cls.__mro__ if not is_framework(base.__module__)]
    names = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def holds_proxy(key: Any) -> bool:
    """Return whether a key of a dict is a traced value or a tuple with one."""
    return isinstance(key, fx.Proxy) or (isinstance(key, tuple) and any(map(holds_proxy, key)))


def member_key(item: Any) -> Any:
    """A key of an item of a set."""
    return (type(item), item) if type(item) in PLAIN else id(item)


def set_dict(items: dict[Any, Any], old: dict[Any, Any], fresh: Mapping[Any, Any]) -> None:
    """Put the items ``old`` back, and a new counter for each that has counted on."""
    # Keys and values may be traced values, which cannot be compared.
    pairs = zip(items, old, strict=False)
    if len(items) != len(old) or any(key is not before or items[key] is not old[before] for key, before in pairs):
        items.clear()
        items.update(old)
    for key, counter in fresh.items():
        if repr(items[key]) != repr(counter):
            items[key] = counter


def set_items(items: dict[str, Any], old: dict[str, Any], fresh: Mapping[Any, Any]) -> None:
    """Put the items of the names in ``old`` back."""
    for name, value in old.items():
        if value is not MISSING:
            items[name] = value
        elif name in items:
            del items[name]
    set_dict(items, dict(items), fresh)


def counters(items: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies of the ``itertools.count`` among ``items``, which cannot be set back."""
    return {key: copy.copy(value) for key, value in items.items() if isinstance(value, itertools.count)}


def set_class(cls: type, old: Mapping[str, Any], fresh: Mapping[str, Any], names: AbstractSet[str]) -> None:
    """Put the attributes ``names`` of a class back."""
    for name, value in list(vars(cls).items()):
        if name not in old and name in names:
            delattr(cls, name)
        elif name in fresh and repr(value) != repr(fresh[name]):
            setattr(cls, name, fresh[name])
    for name in names & old.keys():
        if vars(cls).get(name, MISSING) is not old[name]:
            setattr(cls, name, old[name])


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Put an attribute back."""
    if getattr(owner, name, MISSING) is not value:
        object.__setattr__(owner, name, value)


def set_list(items: Any, old: list[Any]) -> None:
    """Put the items of a list or deque back."""
    if len(items) != len(old) or any(item is not before for item, before in zip(items, old, strict=True)):
        items.clear()
        items.extend(old)


def set_set(items: set[Any], old: set[Any]) -> None:
    """Put the members of a set back."""
    items.clear()
    items.update(old)
