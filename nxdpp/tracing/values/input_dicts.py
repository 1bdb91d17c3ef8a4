"""Inputs in containers: a trace, a split and a stage know the values in a dict as inputs of their own.

::

    batch={"x": x, "more": {"y": y}}   given, and seen by forward
          │ open_inputs       ▲ close_inputs
          ▼                   │
    "batch['x']": x, "batch['more']['y']": y, "batch": InputDict(...)

Lists and tuples of numbers and texts are opened too. All others, and dataclasses, are opened where the caller gives
microbatches: a split would not know their rows.
"""

import operator
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import fx
from torch.fx.proxy import TraceError
from transformers import BatchEncoding, BatchFeature

from nxdpp.tracing.sizes.input_specs import UNKNOWN
from nxdpp.tracing.values.nested import built, fields_of, is_dataclass_instance, leaves_of

_METHODS = frozenset({"copy", "get", "items", "keys", "pop", "values"})
_KINDS = (dict, OrderedDict, BatchEncoding, BatchFeature)
_OF_TORCH = frozenset(torch.return_types.all_return_types)

NUMBERS = (int, float, numpy.number)
"""Types of the numbers among the inputs. A boolean is none."""

_PLAIN = (*NUMBERS, numpy.bool_, str, type(None))


@dataclass(frozen=True)
class InputDict:
    """A container among the inputs: its type, and for each key the name of the value among the opened inputs.

    The keys are the keys of a dict, the positions in a list or tuple, or the names of attributes.
    """

    kind: type
    names: tuple[tuple[Any, str], ...]


def open_inputs(inputs: Mapping[str, Any], all_kinds: bool = False) -> dict[str, Any]:
    """Return the inputs with the values of each dict as inputs of their own, and an ``InputDict`` in its place.

    Dicts may be nested. A dict with keys that are not text stays as it is. Lists and tuples of numbers and texts are
    opened. With ``all_kinds`` dicts with whole numbers as keys, other lists and tuples, named tuples, those of torch
    (``torch.return_types``), dataclasses and ``SimpleNamespace`` are opened too.
    """
    opened: dict[str, Any] = {}
    for name, value in inputs.items():
        parts = _parts(value, all_kinds)
        if parts is None:
            opened[name] = value
        else:
            is_by_name = _has_attributes(value)
            names = {key: f"{name}.{key}" if is_by_name else f"{name}[{key!r}]" for key in parts}
            opened[name] = InputDict(type(value), tuple(names.items()))
            opened |= open_inputs({names[key]: part for key, part in parts.items()}, all_kinds)
    return opened


def _parts(value: Any, all_kinds: bool) -> dict[Any, Any] | None:
    """The values in a container by their keys; ``None`` for a value that is no container."""
    kind = type(value)
    if kind in _KINDS:
        keys = (str, int) if all_kinds else (str,)
        return dict(value.items()) if all(type(key) in keys for key in value) else None
    if not all_kinds:
        is_plain = kind in (list, tuple) and all(isinstance(leaf, _PLAIN) for leaf in leaves_of(value))
        return dict(enumerate(value)) if is_plain else None
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")) or kind in _OF_TORCH:
        return dict(enumerate(value))
    if kind is SimpleNamespace:
        return dict(vars(value))
    return fields_of(value) if _has_attributes(value) else None


def _has_attributes(value: Any) -> bool:
    return type(value) is SimpleNamespace or (is_dataclass_instance(value) and not isinstance(value, Mapping))


def close_inputs(opened: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that ``forward`` takes: each ``InputDict`` becomes a new container of its values."""
    inside = {name for value in opened.values() if isinstance(value, InputDict) for _, name in value.names}

    def closed(value: Any) -> Any:
        if not isinstance(value, InputDict):
            return value
        return _built(value.kind, {key: closed(opened[name]) for key, name in value.names})

    return {name: closed(value) for name, value in opened.items() if name not in inside}


def _built(kind: Any, parts: dict[Any, Any]) -> Any:
    if kind in _KINDS or kind in (list, tuple) or kind in _OF_TORCH:
        return kind(parts if kind in _KINDS else parts.values())
    if kind is SimpleNamespace:
        return SimpleNamespace(**parts)
    return built(kind, dict(zip(kind._fields, parts.values(), strict=True)) if issubclass(kind, tuple) else parts)


def levels(opened: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the names of the opened inputs by their keys: for the inputs themselves, and each container of them."""
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
