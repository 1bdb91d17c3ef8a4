"""Nested values of samples and outputs: torch's pytree, and objects with fields inside."""

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nxdpp.ground.torch_names import pytree


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each leaf.

    It enters tuples, lists, dicts and whatever else pytree knows, and dataclasses and ``SimpleNamespace`` too.
    """

    def at_leaf(leaf: Any) -> Any:
        names = _names(leaf)
        if names is None:
            return function(leaf)
        changed = copy.copy(leaf)
        for name in names:
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(changed, name, map_values(function, getattr(leaf, name)))
        return changed

    return pytree.tree_map(at_leaf, value)


def values_in(value: Any) -> list[Any]:
    """Return the leaves of ``value`` in order, as ``map_values`` meets them."""
    found: list[Any] = []
    map_values(found.append, value)
    return found


def _names(leaf: Any) -> list[str] | None:
    """Names of the attributes of an object with fields; ``None`` for a leaf."""
    is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    if not is_record and type(leaf) is not SimpleNamespace:
        return None
    names = [field.name for field in dataclasses.fields(leaf)] if is_record else []
    # Attributes that are not fields (set in __post_init__) count, too.
    return [name for name in dict.fromkeys([*names, *getattr(leaf, "__dict__", {})]) if hasattr(leaf, name)]
