"""The content of Python objects, put back as it was."""

import copy
import itertools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import CellType
from typing import Any

MISSING: Any = object()


def _as_before(items: dict[Any, Any], old: dict[Any, Any]) -> bool:
    # Keys and values may be traced values, which cannot be compared.
    return len(items) == len(old) and all(
        key is old_key and items[key] is old[old_key] for key, old_key in zip(items, old, strict=True)
    )


def set_dict(items: dict[Any, Any], old: dict[Any, Any], fresh: Mapping[Any, Any]) -> None:
    """Put the items ``old`` back, and a new counter for each that has counted on."""
    if not _as_before(items, old):
        items.clear()
        items.update(old)
    for key, counter in fresh.items():
        if repr(items[key]) != repr(counter):
            items[key] = counter


def set_items(items: dict[str, Any], old: dict[str, Any], fresh: Mapping[Any, Any]) -> None:
    """Put the items of the names in ``old`` back."""
    for name, value in old.items():
        if value is not MISSING:
            items[name] = value
        elif name in items:
            del items[name]
    set_dict(items, dict(items), fresh)


def counters(items: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies of the ``itertools.count`` among ``items``, which cannot be set back."""
    return {key: copy.copy(value) for key, value in items.items() if isinstance(value, itertools.count)}


def set_class(cls: type, old: Mapping[str, Any], fresh: Mapping[str, Any], names: AbstractSet[str]) -> None:
    """Put the attributes ``names`` of a class back."""
    for name, value in list(vars(cls).items()):
        if name not in old and name in names:
            delattr(cls, name)
        elif name in fresh and repr(value) != repr(fresh[name]):
            setattr(cls, name, fresh[name])
    for name in names & old.keys():
        if vars(cls).get(name, MISSING) is not old[name]:
            setattr(cls, name, old[name])


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Put an attribute back."""
    if getattr(owner, name, MISSING) is not value:
        object.__setattr__(owner, name, value)


def set_list(items: Any, old: list[Any]) -> None:
    """Put the items of a list or deque back."""
    if len(items) != len(old) or any(item is not before for item, before in zip(items, old, strict=True)):
        items.clear()
        items.extend(old)


def set_set(items: set[Any], old: set[Any]) -> None:
    """Put the members of a set back."""
    items.clear()
    items.update(old)


def set_cell(cell: CellType, content: Any) -> None:
    """Put the content of a variable of a closure back."""
    cell.cell_contents = content


def set_array(array: Any, old: Any) -> None:
    """Put the elements of an array back."""
    array[...] = old
