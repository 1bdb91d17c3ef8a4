"""Exchange of small values between all ranks over the world's store.

A gloo group over all ranks connects each pair of them: 2,047 sockets on each of 2,048 ranks. The store has a connection
of each rank already, and rank 0 gathers::

    rank 2   writes its value        waits for the list        reads it, removes its value
    rank 0   reads all values        writes the list           removes the list before

A rank that waits blocks on a connection of its own and makes no further requests.
"""

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # public names

from nxdpp.ranks.faults.waits import Wait, first_names
from nxdpp.ranks.wire_form import packed, unpacked

_LIMIT = timedelta(minutes=30)


class StoreExchange:
    """Exchanges of one rank, numbered alike on all ranks; one thread of each makes the ones of a ``name``."""

    def __init__(self, store: Store, rank: int, world_size: int, name: str = "exchange") -> None:
        self._world_store = store
        self._name = name
        self._store: Store | None = None
        self._rank = rank
        self._world_size = world_size
        self._number = 0

    def named(self, name: str) -> "StoreExchange":
        """Return other exchanges of the same ranks, for another thread; the same ``name`` on all ranks, used once."""
        return StoreExchange(self._world_store, self._rank, self._world_size, name)

    def gather(self, value: Any) -> list[Any]:
        """Return a copy of the ``value`` of each rank, in the order of ranks; collective over all ranks.

        Raises ``RuntimeError`` if some rank does not take part within 30 minutes.
        """
        own = packed(value)
        if self._world_size == 1:
            return [unpacked(own)]
        store = self._begin()
        key = self._key("all")
        if self._rank == 0:
            values = self._read_all(store, own)
            _set(store, key, zlib.compress(packed(values), 1))
            # All ranks have read the list before: each of them takes part in this exchange.
            store.delete_key(f"{self._number - 1}_all")
        else:
            _set(store, self._key(self._rank), own)
            self._wait(store, key)
            values = unpacked(zlib.decompress(store.get(key)))
            store.delete_key(self._key(self._rank))
        return [unpacked(form) for form in values]

    def through_first(self, value: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return what ``answer`` on rank 0 gives for this rank; collective over all ranks.

        Only rank 0 reads the values of all ranks, and each rank reads its own answer: for values that are large
        together. ``answer`` takes the values of all ranks, and returns a value for each of them. It must not raise:
        other ranks would wait. Values have types with a form (``wire_form``). Raises ``RuntimeError`` as ``gather``
        does.
        """
        store = self._begin()
        if self._rank == 0:
            values = self._read_all(store, packed(value))
            answers = answer([unpacked(form) for form in values])
            for rank, reply in enumerate(answers[1:], 1):
                _set(store, self._key(f"answer_{rank}"), packed(reply))
            return answers[0]
        _set(store, self._key(self._rank), packed(value))
        key = self._key(f"answer_{self._rank}")
        self._wait(store, key)
        reply = unpacked(store.get(key))
        store.delete_key(key)
        store.delete_key(self._key(self._rank))
        return reply

    def _begin(self) -> Store:
        if self._store is None:
            # A rank that blocks on the world's own connection would hold up torch's threads.
            connection = self._world_store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
            self._store = PrefixStore(self._name, connection)
        self._number += 1
        return self._store

    def _read_all(self, store: Store, own: bytes) -> list[bytes]:
        keys = [self._key(rank) for rank in range(1, self._world_size)]
        try:
            with Wait("exchange of all ranks"):
                store.wait(keys, _LIMIT)
        except DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys, 1) if not store.check([key])]
            raise RuntimeError(
                f"{first_names(missing)} did not take part in {self._exchange} within {_LIMIT}"
            ) from error
        return [own, *store.multi_get(keys)]

    def _wait(self, store: Store, key: str) -> None:
        try:
            with Wait("exchange of all ranks", ranks=[0]):
                store.wait([key], _LIMIT)
        except DistStoreError as error:
            raise RuntimeError(f"rank 0 did not end {self._exchange} within {_LIMIT}") from error

    @property
    def _exchange(self) -> str:
        return f"exchange {self._number} of all ranks"

    def _key(self, what: int | str) -> str:
        return f"{self._number}_{what}"


def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # bytes are missing in torch's stubs
