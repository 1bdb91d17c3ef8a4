"""Plain attributes of modules above layers that code of the user reads: a graph belongs to their values.

A loss weight may change between two steps (``model.beta = 0.1``). The trace reads it, so another value needs another
graph.
"""

from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from nxdpp.tracing.code_names import is_framework
from nxdpp.tracing.reachable_state import ReachableState

Settings = tuple[tuple[int, str, type, str], ...]

_PLAIN = (bool, int, float, str)
_MOST_ITEMS = 100


def settings_of(state: ReachableState | None) -> Settings:
    """The numbers and texts that the spine's code may read from its modules, and from objects that these hold.

    Each has the number of its module, its path, its type and its value as text. There are none without a state.
    """
    if state is None:
        return ()
    return tuple(
        (number, path, type(value), repr(value))
        for number, module in enumerate(state.spine)
        for path, value in _plain_values(module, state.names)
    )


def _plain_values(module: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    yield "training", module.training
    for name, value in vars(module).items():
        if name not in names or name == "training":
            continue
        if type(value) in _PLAIN:
            yield name, value
        else:
            yield from ((f"{name}.{key}", item) for key, item in _content(value, names))


def _content(value: Any, names: set[str]) -> list[tuple[str, Any]]:
    if type(value) is dict and len(value) <= _MOST_ITEMS:
        return [(repr(key), item) for key, item in value.items() if type(item) in _PLAIN]
    if is_framework(type(value).__module__) and not isinstance(value, SimpleNamespace | Namespace):
        return []
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type):
        return []
    return [(name, item) for name, item in attributes.items() if name in names and type(item) in _PLAIN]
