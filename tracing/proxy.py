"""A proxy that also records assignments to its items, and knows the kind of tensor an input is."""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx


class InputKind(NamedTuple):
    """What a trace takes for granted about an input; another kind needs another trace.

    A number has no dimensions and no dtype; its type is ``number``.
    """

    dimensions: int | None
    dtype: torch.dtype | None
    number: type | None = None


def assign_item(value: Any, index: Any, item: Any) -> Any:
    """``value[index] = item`` as an expression, so that later uses depend on it."""
    value[index] = item
    return value


_UNKNOWN = InputKind(None, None)
# The attributes of an input that are facts of its kind.
_KNOWN = {"ndim": "dimensions", "dtype": "dtype"}


class RecordingProxy(fx.Proxy):
    """A traced value.

    What changes it in place (``x[i] = y``, ``x.masked_fill_()``) rebinds the proxy to the changed value: the
    order of reading and writing is then the graph's own, and dead-code elimination keeps it.
    """

    def __getattr__(self, name: str) -> Any:
        known = _KNOWN.get(name)
        if known is not None and (fact := getattr(input_kind(self.node), known)) is not None:
            return fact
        if name.endswith("_") and not name.endswith("__"):
            return _InPlaceMethod(self, name)
        return RecordingAttribute(self, name)

    def __setitem__(self, index: Any, item: Any) -> None:
        self.node = self.tracer.create_proxy("call_function", assign_item, (self, index, item), {}).node

    def __len__(self) -> int:
        size = _length(self.node)
        return super().__len__() if size is None else size


class RecordingAttribute(fx.proxy.Attribute):
    """An attribute of a traced value; the length of a ``shape`` is known where the dimensions are."""

    def __len__(self) -> int:
        dimensions = input_kind(self.root.node).dimensions if self.attr == "shape" else None
        return super().__len__() if dimensions is None else dimensions


class _InPlaceMethod:
    def __init__(self, owner: fx.Proxy, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        tracer = self._owner.tracer
        changed = tracer.create_proxy("call_method", self._name, (self._owner, *args), kwargs)
        self._owner.node = changed.node
        return self._owner


def input_kind(node: fx.Node) -> InputKind:
    """The kind of an input of the graph; nothing is known of any other value."""
    kind: InputKind = node.meta.get("kind", _UNKNOWN)
    return kind


def _length(node: fx.Node) -> int | None:
    """Length of the shape of an input."""
    asks_shape = node.op == "call_function" and node.target in (getattr, operator.getitem) and "shape" in node.args
    asks_size = node.op == "call_method" and node.target == "size" and len(node.args) == 1
    if not (asks_shape or asks_size):
        return None
    owner = node.args[0]
    return input_kind(owner).dimensions if isinstance(owner, fx.Node) else None
