"""Exchange of small values between all ranks over the world's store.

A gloo group over all ranks connects each pair of them: 2,047 sockets on each of 2,048 ranks. The store has a connection
of each rank already, and rank 0 gathers::

    rank 2   writes its value        waits for the list        reads it, removes its value
    rank 0   reads all values        writes the list           removes the list before

A rank that waits blocks on a connection of its own and makes no further requests.
"""

import pickle
import zlib
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public, though not in its __all__
    DistStoreError,
    PrefixStore,
    Store,
)

_LIMIT = timedelta(minutes=30)
_RANKS_SHOWN = 8


class StoreExchange:
    """Exchanges of one rank, numbered alike on all ranks.

    Args:
        store: the store of this start.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._world_store = store
        self._store: Store | None = None
        self._rank = rank
        self._world_size = world_size
        self._number = 0

    def gather(self, value: Any) -> list[Any]:
        """Return the pickled ``value`` of each rank, in the order of ranks; collective over all ranks.

        Raises ``RuntimeError`` if some rank does not take part within 30 minutes.
        """
        own = pickle.dumps(value)
        if self._world_size == 1:
            return [pickle.loads(own)]
        if self._store is None:
            # A rank that blocks on the world's own connection would hold up torch's threads.
            connection = self._world_store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
            self._store = PrefixStore("exchange", connection)
        self._number += 1
        values = self._collect(self._store, own) if self._rank == 0 else self._contribute(self._store, own)
        return [pickle.loads(pickled) for pickled in values]

    def _collect(self, store: Store, own: bytes) -> list[bytes]:
        keys = [self._key(rank) for rank in range(1, self._world_size)]
        try:
            store.wait(keys, _LIMIT)
        except DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys, 1) if not store.check([key])]
            shown = ", ".join(map(str, missing[:_RANKS_SHOWN])) + (", ..." if len(missing) > _RANKS_SHOWN else "")
            raise RuntimeError(f"rank {shown} did not take part in {self._exchange} within {_LIMIT}") from error
        values = [own, *store.multi_get(keys)]
        _set(store, self._key("all"), zlib.compress(pickle.dumps(values), 1))
        # All ranks have read the list before: each of them takes part in this exchange.
        store.delete_key(self._key("all", self._number - 1))
        return values

    def _contribute(self, store: Store, own: bytes) -> list[bytes]:
        _set(store, self._key(self._rank), own)
        try:
            store.wait([self._key("all")], _LIMIT)
        except DistStoreError as error:
            raise RuntimeError(f"rank 0 did not end {self._exchange} within {_LIMIT}") from error
        values: list[bytes] = pickle.loads(zlib.decompress(store.get(self._key("all"))))
        store.delete_key(self._key(self._rank))
        return values

    @property
    def _exchange(self) -> str:
        return f"exchange {self._number} of all ranks (a call that is collective over all ranks)"

    def _key(self, what: int | str, number: int | None = None) -> str:
        return f"{self._number if number is None else number}_{what}"


def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # bytes are missing in torch's stubs
