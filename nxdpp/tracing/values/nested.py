"""Nested values: torch's pytree, extended by dataclasses, and by named tuples whose constructor does not run."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nxdpp.ground.torch_names import pytree


class Leaf:
    """Base class of dataclasses that are leaves."""


class _Opened:
    """A dataclass or named tuple that pytree flattens; unflattening returns the value itself."""

    def __init__(self, value: Any) -> None:
        self.value = value


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass or named tuple by name."""
    names = list(value._fields) if _is_named_tuple(value) else [field.name for field in dataclasses.fields(value)]
    # Attributes that are not fields (set in __post_init__) are kept.
    names += [name for name in getattr(value, "__dict__", {}) if name not in names]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _flatten_opened(opened: _Opened) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    fields = fields_of(opened.value)
    return [_open(field) for field in fields.values()], (type(opened.value), tuple(fields))


def built(cls: type, fields: Mapping[str, Any]) -> Any:
    """Return an object of ``cls``, such as a dataclass, with these attributes; its constructor does not run.

    A constructor may look at its values (``PackedSequence`` does), and here they can be layouts of tensors.
    """
    items = getattr(cls, "_fields", ()) if issubclass(cls, tuple) else ()
    value: Any = tuple.__new__(cls, [fields[name] for name in items]) if items else object.__new__(cls)
    for name, field in ((name, field) for name, field in fields.items() if name not in items):
        # A frozen dataclass refuses plain assignment.
        object.__setattr__(value, name, field)
    return value


def _build(fields: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    cls, names = context
    return built(cls, dict(zip(names, fields, strict=True)))


pytree.register_pytree_node(_Opened, _flatten_opened, _build, serialized_type_name="nxdpp.tracing.nested.dataclass")


def _open(value: Any) -> Any:
    def opened(leaf: Any) -> Any:
        return _Opened(leaf) if is_dataclass_instance(leaf) or _is_named_tuple(leaf) else leaf

    return pytree.tree_map(opened, value, is_leaf=_is_named_tuple)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and bool(getattr(value, "_fields", ()))


def is_dataclass_instance(value: Any) -> bool:
    """Return whether ``value`` is an instance of a dataclass and not a ``Leaf``."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Leaf)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of ``value`` and the spec for ``pytree.tree_unflatten``, which rebuilds dataclasses too."""
    return pytree.tree_flatten(_open(value))


def leaves_of(value: Any) -> list[Any]:
    """The leaves of ``value``."""
    return flatten(value)[0]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each leaf."""
    leaves, structure = flatten(value)
    return pytree.tree_unflatten([function(leaf) for leaf in leaves], structure)
