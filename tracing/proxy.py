"""A proxy that also records assignments to its items, and knows what follows from the kinds of the inputs."""

import dis
import operator
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import fx

from nxdpp.tracing.kinds import UNKNOWN, InputKind, kind_of, length_of


def assign_item(value: Any, index: Any, item: Any) -> Any:
    """``value[index] = item`` as an expression, so that later uses depend on it."""
    value[index] = item
    return value


# The attributes of a traced value that are facts of its kind.
_KNOWN = {"ndim": "dimensions", "dtype": "dtype"}


class RecordingProxy(fx.Proxy):
    """A traced value.

    What changes it in place (``x[i] = y``, ``x.masked_fill_()``) rebinds the proxy to the changed value: the
    order of reading and writing is then the graph's own, and dead-code elimination keeps it.
    """

    def __getattr__(self, name: str) -> Any:
        known = _KNOWN.get(name)
        if known is not None and (fact := getattr(_kind(self), known)) is not None:
            return fact
        if name.endswith("_") and not name.endswith("__"):
            return _InPlaceMethod(self, name)
        return RecordingAttribute(self, name)

    def __setitem__(self, index: Any, item: Any) -> None:
        self.node = self.tracer.create_proxy("call_function", assign_item, (self, index, item), {}).node

    def __len__(self) -> int:
        size = _length(self)
        return super().__len__() if size is None else size

    def __iter__(self) -> Iterator[Any]:
        return _items(self, sys._getframe(1))


class RecordingAttribute(fx.proxy.Attribute):
    """An attribute of a traced value, or a method about to be called; a known shape can be unpacked."""

    def __len__(self) -> int:
        size = _length(self)
        return super().__len__() if size is None else size

    def __iter__(self) -> Iterator[Any]:
        return _items(self, sys._getframe(1))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a method call, unless its answer is known."""
        dimensions = _kind(self.root).dimensions
        if self.attr in ("dim", "ndimension") and dimensions is not None:
            return dimensions
        return super().__call__(*args, **kwargs)


class _InPlaceMethod:
    def __init__(self, owner: fx.Proxy, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        tracer = self._owner.tracer
        changed = tracer.create_proxy("call_method", self._name, (self._owner, *args), kwargs)
        self._owner.node = changed.node
        return self._owner


def _kind(proxy: fx.Proxy) -> InputKind:
    root = getattr(proxy.tracer, "root", None)
    return UNKNOWN if root is None else kind_of(proxy.node, root)


def _length(proxy: fx.Proxy) -> int | None:
    root = getattr(proxy.tracer, "root", None)
    return None if root is None else length_of(proxy.node, root)


def _items(proxy: fx.Proxy, caller: FrameType) -> Iterator[Any]:
    """The items of a value whose length is known, or told by the caller's ``a, b = value``."""
    size = _length(proxy)
    if size is None:
        code = caller.f_code.co_code
        if dis.opname[code[caller.f_lasti]] != "UNPACK_SEQUENCE":
            return proxy.tracer.iter(proxy)
        size = code[caller.f_lasti + 1]
    return (operator.getitem(proxy, i) for i in range(size))
