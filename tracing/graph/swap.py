"""Temporary values in dictionaries, and sets that have the same order in every process while a model is traced.

Python orders a set of strings by their hashes, which differ from process to process. A model that makes a mask for
each of ``set(config.layer_types)`` would have another graph on every rank.
"""

import builtins
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import nn


@contextmanager
def swapped(dictionary: dict[str, Any], changes: Mapping[str, Any]) -> Iterator[None]:
    """Put ``changes`` into ``dictionary``, an object's ``__dict__`` or a module's globals; restore it afterwards."""
    originals = {name: dictionary[name] for name in changes if name in dictionary}
    dictionary.update(changes)
    try:
        yield
    finally:
        for name in changes.keys() - originals.keys():
            del dictionary[name]
        dictionary.update(originals)


def swapped_in_this_thread(
    dictionary: dict[str, Any], changes: Mapping[str, Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Put functions into ``dictionary`` as ``swapped`` does. Other threads still call the present ones."""
    return swapped(dictionary, {n: _in_this_thread(new, dictionary[n]) for n, new in changes.items()})


def _in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    # The thread of a data loader makes tensors at the same time.
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return call


class _AnySet(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return builtins.isinstance(instance, builtins.set)


class StableSet(builtins.set[Any], metaclass=_AnySet):
    """A set in the order of its members' ``repr``. Every set is an instance of it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))


@contextmanager
def stable_attributes(modules: list[nn.Module]) -> Iterator[None]:
    """Make the sets that are attributes of ``modules`` stable sets; restore them afterwards."""
    with ExitStack() as stack:
        for module in modules:
            sets = {name: StableSet(value) for name, value in vars(module).items() if type(value) is builtins.set}
            stack.enter_context(swapped(vars(module), sets))
        yield


def sources(modules: list[nn.Module], frameworks: re.Pattern[str]) -> list[ModuleType]:
    """The Python modules that define the classes of ``modules``, without the modules of ``frameworks``."""
    classes = {cls for kind in {type(module) for module in modules} for cls in kind.__mro__}
    names = {cls.__module__ for cls in classes if not frameworks.match(cls.__module__)}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]
