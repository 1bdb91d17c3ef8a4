"""Dicts that modules return: ``for name, loss in losses.items()``.

The keys follow from a run on fake tensors, and are a fact of the graph. Each item is a value of its own::

    criterion ─┬─ getitem "mask" ── mul ──┐
               └─ getitem "dice" ── mul ──┴── add ── output

Code that reads a key again gets the same value, with the changes in place that it made (``loss *= weight``).
"""

from typing import Any

from torch import fx

from nxdpp.tracing.sizes.sizes import UnknownSizeError
from nxdpp.tracing.values.metadata import is_metadata

# The attribute of a traced value that has its items.
ITEMS = "_nxdpp_items_of_dict"
# Keys in a trace of the order of modules, whose graph is never run.
_GUESSED = ("loss",)
METHODS = frozenset({"items", "keys", "values"})
_Items = tuple[fx.Node, dict[Any, Any], dict[Any, fx.Node | None]]


def keys_of(value: Any) -> tuple[Any, ...]:
    """The keys of a dict. Raises ``UnknownSizeError`` for any other value."""
    if not isinstance(value, dict) or not all(isinstance(key, str | int) for key in value):
        raise UnknownSizeError(f"a {type(value).__name__} is not read by keys")
    return tuple(value)


def items_of(value: fx.Proxy) -> dict[Any, Any] | None:
    """The items of a traced dict whose keys are known, the same at each call; ``None`` for any other value."""
    tracer: Any = value.tracer
    if tracer.finished or is_metadata(value.node):
        return None
    if (known := known_items(value)) is not None:
        return known
    try:
        keys = tracer.fact(value.node, keys_of)
    except UnknownSizeError:
        if not tracer.guesses or value.node.op != "call_module":
            return None
        keys = _GUESSED
    source: Any = value
    items = {key: source[key] for key in keys}
    vars(value)[ITEMS] = (value.node, items, {key: _node(item) for key, item in items.items()})
    return items


def known_items(value: fx.Proxy) -> dict[Any, Any] | None:
    """The items of a dict that code has read by ``items_of``, unless the dict has changed since."""
    found: _Items | None = vars(value).get(ITEMS)
    return found[1] if found is not None and found[0] is value.node else None


def refuse_changed_items(value: fx.Proxy) -> None:
    """Raise ``RuntimeError`` for a dict with an item that was changed in place: the node has the item of before."""
    found: _Items | None = vars(value).get(ITEMS)
    if found is None or found[0] is not value.node:
        return
    changed = [key for key, item in found[1].items() if _node(item) is not found[2][key]]
    if changed:
        tracer: Any = value.tracer
        raise tracer.refused(
            f"the dict {value.node.name} is used after its item {changed[0]!r} was changed in place, outside the "
            f"transformer layers. Make a dict of the changed items ({{name: loss * 2 for name, loss in "
            f"losses.items()}})"
        )


def _node(item: Any) -> fx.Node | None:
    return item.node if isinstance(item, fx.Proxy) else None
