"""Functions and modules that may draw from torch's random generators, found without a list of our own.

torch tags each of its operations that follows from a seed. A function written in Python may draw if its code names
such an operation, or a function of torch or transformers that does.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdpp.tracing.code.names import used_names

_LIBRARIES = ("torch.", "transformers.")


@cache
def is_seeded(operation: str) -> bool:
    """Return whether torch has an operation of this name that draws random numbers."""
    packet = getattr(torch.ops.aten, operation, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in packet.overloads())


def may_draw(function: Callable[..., Any]) -> bool:
    """Return whether a function of torch may draw random numbers, with any arguments."""
    try:
        return _may_draw(function)
    except TypeError:  # not hashable
        return False


@cache
def _may_draw(function: Callable[..., Any]) -> bool:
    return any(is_seeded(name) for name in _names(function, set()))


def forward_may_draw(module: nn.Module) -> bool:
    """Return whether the ``forward`` of ``module``'s class may draw random numbers, apart from its submodules'."""
    return may_draw(type(module).forward)


def _names(function: Any, seen: set[Any]) -> Iterator[str]:
    """The names in the code of ``function`` and of the library functions that it names; its own without a code."""
    if not isinstance(function, FunctionType):
        yield getattr(function, "__name__", "")
        return
    if function in seen:
        return
    seen.add(function)
    for name in used_names(function):
        yield name
        used = function.__globals__.get(name) or getattr(functional, name, None)
        if isinstance(used, FunctionType) and (used.__module__ or "").startswith(_LIBRARIES):
            yield from _names(used, seen)
    # boolean_dispatch of torch chooses between two functions.
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, FunctionType):
                yield from _names(cell.cell_contents, seen)
