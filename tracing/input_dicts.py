"""Inputs in dicts: a trace, a split and a stage know the values in a dict as inputs of their own.

::

    batch={"x": x, "more": {"y": y}}   given, and seen by forward
          │ open_inputs       ▲ close_inputs
          ▼                   │
    "batch['x']": x, "batch['more']['y']": y, "batch": InputDict(...)
"""

import operator
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.proxy import TraceError
from transformers import BatchEncoding, BatchFeature

from nxdpp.tracing.input_specs import UNKNOWN

_METHODS = frozenset({"copy", "get", "items", "keys", "pop", "values"})
_KINDS = (dict, OrderedDict, BatchEncoding, BatchFeature)


@dataclass(frozen=True)
class InputDict:
    """A dict among the inputs: its type, and for each key the name of the value among the opened inputs."""

    kind: type
    names: tuple[tuple[str, str], ...]


def open_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with the values of each dict as inputs of their own, beside an ``InputDict`` in its place.

    Dicts may be nested. A dict with keys that are no text stays as it is.
    """
    opened: dict[str, Any] = {}
    for name, value in inputs.items():
        if type(value) in _KINDS and all(isinstance(key, str) for key in value):
            names = {key: f"{name}[{key!r}]" for key in value}
            opened[name] = InputDict(type(value), tuple(names.items()))
            opened |= open_inputs({names[key]: part for key, part in value.items()})
        else:
            opened[name] = value
    return opened


def close_inputs(opened: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that ``forward`` takes: each ``InputDict`` becomes a new dict of its values."""
    inside = {name for value in opened.values() if isinstance(value, InputDict) for _, name in value.names}

    def closed(value: Any) -> Any:
        if not isinstance(value, InputDict):
            return value
        return value.kind({key: closed(opened[name]) for key, name in value.names})

    return {name: closed(value) for name, value in opened.items() if name not in inside}


def levels(opened: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the names of the opened inputs by their keys: for the inputs themselves, and for each dict among them."""
    dicts = [dict(value.names) for value in opened.values() if isinstance(value, InputDict)]
    return [{name: name for name in opened}, *dicts]


def reads_dict(graph: fx.Graph | None, error: Exception) -> bool:
    """Return whether an unfinished ``graph`` reads an input of unknown kind like a dict.

    ``error`` ended the trace. ``key in batch`` leaves no node: Python iterates over the input.
    """
    inputs = [] if graph is None else [node for node in graph.nodes if node.op == "placeholder"]
    unknown = [node for node in inputs if node.meta.get("spec") == UNKNOWN]
    if any(_is_item_of_dict(user) for node in unknown for user in node.users):
        return True
    is_iterated = isinstance(error, TraceError) and "iterated" in str(error)
    return is_iterated and any(not node.users for node in unknown)


def _is_item_of_dict(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    return node.target is operator.getitem and isinstance(node.args[1], str)
