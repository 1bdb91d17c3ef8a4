"""Temporary values in dictionaries, and sets that have the same order in every process while a model is traced.

Python orders a set of strings by their hashes, which differ from process to process. A model that makes a mask for
each of ``set(config.layer_types)`` would have another graph on every rank.
"""

import builtins
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from torch import nn


def swapped(dictionary: dict[str, Any], changes: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Put ``changes`` into ``dictionary``, an object's ``__dict__`` or a module's globals; restore it afterwards."""
    return all_swapped([(dictionary, changes)])


@contextmanager
def all_swapped(changes: Iterable[tuple[dict[str, Any], Mapping[str, Any]]]) -> Iterator[None]:
    """Put changes into each of several dictionaries, as ``swapped`` does."""
    done: list[tuple[dict[str, Any], dict[str, Any], Mapping[str, Any]]] = []
    try:
        for dictionary, new in changes:
            done.append((dictionary, {name: dictionary[name] for name in new if name in dictionary}, new))
            dictionary.update(new)
        yield
    finally:
        for dictionary, originals, new in reversed(done):
            for name in new.keys() - originals.keys():
                del dictionary[name]
            dictionary.update(originals)


def replaced(namespaces: Iterable[dict[str, Any]], changes: Mapping[int, Any]) -> AbstractContextManager[None]:
    """Put the values of ``changes`` in place of the objects of these ids, under all names in ``namespaces``."""
    return all_swapped(
        (names, {n: changes[id(v)] for n, v in names.items() if id(v) in changes}) for names in namespaces
    )


def swapped_in_this_thread(
    dictionary: dict[str, Any], changes: Mapping[str, Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Put functions into ``dictionary`` as ``swapped`` does. Other threads still call the present ones."""
    return swapped(dictionary, {n: in_this_thread(new, dictionary[n]) for n, new in changes.items()})


def in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` for this thread, ``original`` for others: a data loader makes tensors at the same time."""
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


def stable_attributes(modules: list[nn.Module]) -> AbstractContextManager[None]:
    """Make the sets that are attributes of ``modules`` stable sets; restore them afterwards."""
    return all_swapped(
        (vars(m), {name: StableSet(value) for name, value in vars(m).items() if type(value) is builtins.set})
        for m in modules
    )


def sources(modules: list[nn.Module], frameworks: re.Pattern[str]) -> list[ModuleType]:
    """The Python modules that define the classes of ``modules``, without the modules of ``frameworks``."""
    classes = {cls for kind in {type(module) for module in modules} for cls in kind.__mro__}
    names = {cls.__module__ for cls in classes if not frameworks.match(cls.__module__)}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]
