"""The one policy of every cache that grows with the inputs: the items that were used last are kept.

All ranks of a pipeline use the same items in the same order. All of them therefore drop the same items: an engine on
one rank needs the engines on the others.
"""

from collections import OrderedDict
from typing import Any, TypeVar

# Sequences of 1 to 256 tokens, one item each, stay in a cache.
KEPT = 256

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class LastUsed(OrderedDict[_Key, _Value]):
    """A dictionary of the ``KEPT`` items that were read or written last."""

    def __getitem__(self, key: _Key) -> _Value:
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def get(self, key: _Key, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` for a key that is not kept."""
        value = super().get(key, default)
        if value is not default:
            self.move_to_end(key)
        return value

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > KEPT:
            del self[next(iter(self))]
