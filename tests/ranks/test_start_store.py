"""Name of a start, agreed on over a store that has the keys of earlier starts."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks import start_store
from nxdpp.ranks.start_store import store_of_start

RANKS = 3


@contextmanager
def _ranks() -> Iterator[Callable[..., Future[Store]]]:
    """A function that starts a rank in a thread, with a connection of its own to one store."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    with ThreadPoolExecutor(2 * RANKS) as pool:

        def start(rank: int, store: Store | None = None) -> Future[Store]:
            connection = store if store is not None else host.clone()  # type: ignore[attr-defined]
            return pool.submit(store_of_start, connection, rank, RANKS)

        yield start


def _identity(started: Future[Store]) -> bytes:
    """A value that is in the store of this start alone."""
    return started.result(timeout=20).compare_set("identity", "", uuid4().hex)


def test_all_ranks_have_one_name_and_each_start_another() -> None:
    with _ranks() as start:
        names = [{_identity(started) for started in [start(rank) for rank in range(RANKS)]} for _ in range(3)]
    assert [len(of_start) for of_start in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_starts_late_is_not_taken_for_its_former_self(late: int) -> None:
    """The store has the former question of each rank, which rank 0 may read."""
    with _ranks() as start:
        former = [start(rank) for rank in range(RANKS)]
        old = {_identity(started) for started in former}
        early = {rank: start(rank) for rank in range(RANKS) if rank != late}
        time.sleep(0.5)
        assert not any(started.done() for rank, started in early.items() if rank == 0 or late == 0)
        new = {_identity(started) for started in [*early.values(), start(late)]}
    assert len(new) == 1
    assert new.isdisjoint(old)


def test_keys_of_a_start_that_failed_do_not_matter() -> None:
    with _ranks() as start:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start_store, "_LIMIT", timedelta(seconds=0.3))
            for failed in [start(0), start(1)]:
                with pytest.raises(RuntimeError, match="to start for"):
                    failed.result(timeout=20)
        assert len({_identity(started) for started in [start(rank) for rank in (2, 1, 0)]}) == 1


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start_store, "_SECONDS_TO_A_LINE", 0.3)
    with _ranks() as start:
        first, third = start(0), start(2)
        time.sleep(1.0)
        second = start(1)
        assert _identity(first) == _identity(second) == _identity(third)
        assert "rank 0 waits for rank 1 to start, for 0 s" in capfd.readouterr().err
        second = start(1)
        time.sleep(1.0)
        assert len({_identity(started) for started in (second, start(0), start(2))}) == 1
        assert "rank 1 waits for rank 0, or for ranks that rank 0 names, to start" in capfd.readouterr().err
