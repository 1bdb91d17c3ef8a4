"""State of single Python objects: generators, iterators, cells, slots and variables of a context."""

import functools
import itertools
import random
from collections.abc import Callable
from contextvars import Context, ContextVar
from types import CellType, GeneratorType
from typing import Any

import numpy
import torch
from torch import fx

from nxdpp.tracing.code_names import is_framework
from nxdpp.tracing.put_back import MISSING

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
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, repr([(n, v) for n, v in frame.f_locals.items() if type(v) in PLAIN])


def set_variable(variable: ContextVar[Any], content: Any) -> None:
    """Set ``variable`` to ``content``; ``MISSING`` stands for no value of its own."""
    if content is MISSING:
        # A variable cannot lose its value again; it gets that of an empty context.
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
