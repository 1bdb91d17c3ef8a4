"""Cost of a job of many ranks, computed from the code: groups, sockets, requests of the store, files.

    python benchmarks/cost_at_scale.py --ranks 2048 --pipeline 64 --shards 191 --gigabytes 810

No such job runs. One rank makes its groups with torch's fake process group. A few threads go through a start, an
exchange of all ranks and gloo's own start over a store that counts. The requests of a rank are then known for any
number of ranks. The seconds follow from the requests that one TCPStore of this machine answers.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch.distributed as dist  # noqa: E402
from torch.distributed import (  # type: ignore[attr-defined]  # noqa: E402  # public, though not in its __all__
    HashStore,
    TCPStore,
    device_mesh,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from benchmarks.report import markdown_table  # noqa: E402
from nxdpp.ranks import process_groups, start_store, store_exchange, transfer_groups  # noqa: E402
from nxdpp.ranks.faults.watch_store import WatchStore, pause_seconds, poll_seconds  # noqa: E402
from nxdpp.ranks.rank_mesh import RankMesh  # noqa: E402

# The world's own connection, the failure watch's, and the exchanges'.
STORE_CONNECTIONS = 3

# The exchanges of all ranks in a save of a model without adapters.
EXCHANGES_OF_A_SAVE = 5


RANKS_OF_A_HOST = 8


class Group(NamedTuple):
    """A group of ``size`` ranks on ``backend``."""

    backend: str
    size: int


class Groups(NamedTuple):
    """The groups of one rank, and the calls and seconds in which it makes them."""

    own: list[Group]
    calls: int
    seconds: float


def groups_of_a_rank(backend: str, ranks: int, pipeline: int, rank: int = 0) -> Groups:
    """The groups that ``rank`` is in, made by ``build_groups`` over torch's fake process group."""
    own, calls = [Group(backend, ranks)], 0
    new_group = dist.distributed_c10d.new_group

    def counted(*, ranks: Sequence[int], backend: str | None = None, **others: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank in ranks:
            own.append(Group(backend or own[0].backend, len(ranks)))
        return new_group(ranks=ranks, backend="fake")

    def mesh(groups: Any, kind: str, **others: Any) -> device_mesh.DeviceMesh:
        return device_mesh.DeviceMesh.from_group(groups, "cpu", **others)

    device: Any = SimpleNamespace(type="cuda" if backend == "nccl" else "cpu")
    mesh_of_ranks = RankMesh(pipeline, ranks // pipeline, 1)
    store: Any = SimpleNamespace(
        add=lambda key, amount: ranks,
        set=lambda key, value: None,
        get=lambda key: b"",
        wait=lambda keys: None,
        compare_set=lambda key, expected, value: value.encode(),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with (
            patch.object(dist.distributed_c10d, "new_group", counted),
            patch.object(process_groups, "DeviceMesh", SimpleNamespace(from_group=mesh)),
            patch.object(transfer_groups, "_first_exchange"),
        ):
            began = time.perf_counter()
            process_groups.build_groups(mesh_of_ranks, True, device, store)
            return Groups(own, calls, time.perf_counter() - began)
    finally:
        dist.destroy_process_group()


def sockets_of_a_rank(groups: Sequence[Group]) -> int:
    """Sockets of a rank: gloo connects all pairs of a group. NCCL's own sockets are not counted."""
    return sum(group.size - 1 for group in groups if group.backend == "gloo") + STORE_CONNECTIONS


class _CountingStore(dist.Store):  # type: ignore[name-defined,misc]  # public, though not in its __all__
    """A connection to ``store`` that counts its requests, and separately the ones that only poll."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self.requests = 0
        self.polls = 0

    def set(self, key: str, value: Any) -> Any:
        self.requests += 1
        return self._store.set(key, value)

    def get(self, key: str) -> Any:
        self.requests += 1
        return self._store.get(key)

    def add(self, key: str, amount: int) -> Any:
        self.requests += amount > 0
        self.polls += amount == 0
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> Any:
        self.polls += 1
        return self._store.check(keys)

    def wait(self, keys: list[str], *limit: Any) -> Any:
        self.requests += 1
        return self._store.wait(keys, *limit)

    def multi_get(self, keys: list[str]) -> Any:
        self.requests += 1
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> Any:
        self.requests += 1
        return self._store.multi_set(keys, values)

    def delete_key(self, key: str) -> Any:
        self.requests += 1
        return self._store.delete_key(key)

    def clone(self) -> "_CountingStore":
        return self


def requests_of_a_rank(act: Callable[[Any, int, int], Any], ranks: int) -> list[int]:
    """Requests of each of ``ranks`` ranks in ``act(store, rank, ranks)``, without polls."""
    memory = HashStore()
    stores = [_CountingStore(memory) for _ in range(ranks)]
    with ExitStack() as stack:
        # A store has one start and one exchange. Prefixes would hide the counts behind C++.
        for module in (start_store, store_exchange):
            stack.enter_context(patch.object(module, "PrefixStore", lambda prefix, store: store))
        pool = stack.enter_context(ThreadPoolExecutor(ranks))
        for future in [pool.submit(act, store, rank, ranks) for rank, store in enumerate(stores)]:
            future.result(timeout=120)
    return [store.requests for store in stores]


def requests_at(act: Callable[[Any, int, int], Any], ranks: int) -> int:
    """Requests of the last rank of ``ranks`` in ``act``: they grow evenly with the ranks, or not at all."""
    few, more = requests_of_a_rank(act, 4)[-1], requests_of_a_rank(act, 6)[-1]
    return few + (more - few) // 2 * (ranks - 4)


def exchange(store: Any, rank: int, ranks: int) -> None:
    """One exchange of all ranks."""
    store_exchange.StoreExchange(store, rank, ranks).gather(None)


def start_gloo(store: Any, rank: int, ranks: int) -> Any:
    """Start of a gloo group, which must live until all ranks have connected."""
    return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=30))


def polls_of_the_watch() -> int:
    """Requests of one poll of the failure watch in a job that moves."""
    store = _CountingStore(HashStore())
    assert WatchStore(store).state() is None
    return store.requests + store.polls


def requests_a_second(seconds: float = 1.0, connections: int = 4) -> float:
    """Small requests that one TCPStore of this machine answers in a second."""
    host: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end = time.perf_counter() + seconds

    def ask(store: Any) -> int:
        count = 0
        while time.perf_counter() < end:
            store.check(["key"])
            count += 1
        return count

    with ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(ask, [host.clone() for _ in range(connections)])) / seconds


def rows(backend: str, ranks: int, pipeline: int, shards: int, gigabytes: float, rate: float) -> dict[str, str]:
    """The figures of a world on ``backend``, 8 ranks a host; ``rate`` is the requests a second of the store."""
    groups = groups_of_a_rank(backend, ranks, pipeline, rank=1)
    exchanges = requests_at(exchange, ranks)
    # An exchange of the kinds of devices, the sizes of rank 0, and the wait for the groups of all ranks.
    start = requests_at(start_store.store_of_start, ranks) + exchanges + 3
    gloo = sum(requests_at(start_gloo, group.size) for group in groups.own if group.backend == "gloo")
    return {
        "groups of a rank": f"{len(groups.own)}",
        "calls that make groups, seconds": f"{groups.calls:,}, {groups.seconds:.1f}",
        "sockets of a rank (gloo and store)": f"{sockets_of_a_rank(groups.own):,}",
        "connections of the store": f"{STORE_CONNECTIONS * ranks:,}",
        "requests of a start: ours": f"{start * ranks:,}",
        "requests of a start: gloo's addresses": f"{gloo * ranks:,}",
        "seconds of these requests": f"{(start + gloo) * ranks / rate:.1f}",
        "requests a second of the watch": f"{polls_of_the_watch() * ranks / poll_seconds(ranks):,.0f}",
        "requests a second during a failure": f"{ranks / pause_seconds(ranks):,.0f}",
        "requests of save_pretrained, seconds": _exchanges(EXCHANGES_OF_A_SAVE * exchanges * ranks, rate),
        "headers opened by load_pretrained": f"{ranks // RANKS_OF_A_HOST * shards:,}",
        "gigabytes read by load_pretrained": f"{gigabytes:,.0f}",
    }


def _exchanges(requests: int, rate: float) -> str:
    return f"{requests:,}, {requests / rate:.1f}"


def main() -> None:
    """Print one table in Markdown."""
    parser = argparse.ArgumentParser(description="Cost of a job of many ranks, computed from the code.")
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--pipeline", type=int, default=64, help="ranks of a pipeline")
    parser.add_argument("--shards", type=int, default=191, help="files of the checkpoint")
    parser.add_argument("--gigabytes", type=float, default=810, help="size of the checkpoint")
    given = parser.parse_args()
    rate = requests_a_second()
    sizes = (given.ranks, given.pipeline, given.shards, given.gigabytes)
    columns = [rows(backend, *sizes, rate) for backend in ("nccl", "gloo")]
    cells = [[name, *(column[name] for column in columns)] for name in columns[0]]
    print(f"One store answers {rate:,.0f} requests a second here.\n")
    print(markdown_table((f"{given.ranks} ranks", "NCCL", "gloo"), cells, left=(f"{given.ranks} ranks",)))


if __name__ == "__main__":
    main()
