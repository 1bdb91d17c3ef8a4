"""Sets whose order is the same in every process.

Python orders a set of strings by their hashes, which differ from process to process; a model that makes a mask for
each of ``set(config.layer_types)`` would be another graph on every rank.
"""

import builtins
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from nxdpp.tracing.swap import swapped


class _AnySet(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return builtins.isinstance(instance, builtins.set)


class StableSet(builtins.set[Any], metaclass=_AnySet):
    """A set in the order of what its members print as; every set is an instance of it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))


@contextmanager
def stable_attributes(modules: list[nn.Module]) -> Iterator[None]:
    """Have the sets that are attributes of ``modules`` in a stable order for a while."""
    with ExitStack() as stack:
        for module in modules:
            sets = {name: StableSet(value) for name, value in vars(module).items() if type(value) is builtins.set}
            stack.enter_context(swapped(vars(module), sets))
        yield
