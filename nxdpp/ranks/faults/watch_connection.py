"""Connection of one rank to the world's store, until the last request of the rank.

The host of the store ends once every other rank has said that it no longer needs the store. A thread of such a rank
that asked later would let torch print the trace of a lost connection after the last line of the rank.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

_T = TypeVar("_T")


class WatchConnection:
    """The requests of ``store`` that the failure watch makes, from all threads of a rank, one at a time.

    After ``add_last`` each request raises ``RuntimeError``, as after the loss of the store.

    Attributes:
        host_has_ended: tells whether the process that has the store is known to have ended. Torch would print the
            trace of each request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.Lock()
        self._is_closed = False
        self.host_has_ended: Callable[[], bool] = lambda: False

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the value of ``key``, 0 at first, and return the sum."""
        return self._ask(lambda: self._store.add(key, number))

    def add_last(self, key: str) -> None:
        """Add 1 to the value of ``key``; the last request of this rank."""
        self._ask(lambda: self._store.add(key, 1), is_last=True)

    def set(self, key: str, value: str) -> None:
        """Write an entry."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Read an entry, which must be there."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all entries are there."""
        return self._ask(lambda: self._store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` where the entry is ``expected``, and return the entry afterwards."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def _ask(self, request: Callable[[], _T], is_last: bool = False) -> _T:
        with self._turn:
            if self._is_closed:
                raise RuntimeError("this rank has made its last request of the failure watch's store")
            if self.host_has_ended():
                raise RuntimeError("the process that has the failure watch's store has ended")
            self._is_closed = is_last
            return request()
