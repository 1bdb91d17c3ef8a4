"""Exchange of values between all ranks over a store."""

import os
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its __all__

from nxdpp.ranks import store_exchange
from nxdpp.ranks.store_exchange import StoreExchange

RANKS = 4


@contextmanager
def _ranks(count: int = RANKS) -> Iterator[tuple[TCPStore, list[StoreExchange], ThreadPoolExecutor]]:
    """A store with one exchange for each rank, and threads to run them."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    clones = [host.clone() for _ in range(count)]  # type: ignore[attr-defined]  # missing in torch's stubs
    with ThreadPoolExecutor(count) as pool:
        yield host, [StoreExchange(clone, rank, count) for rank, clone in enumerate(clones)], pool


def test_each_rank_gets_all_values_in_order() -> None:
    with _ranks() as (_, exchanges, pool):
        for number in range(3):
            gathered = [pool.submit(exchange.gather, (number, rank)) for rank, exchange in enumerate(exchanges)]
            for future in gathered:
                assert future.result(timeout=20) == [(number, rank) for rank in range(RANKS)]


def test_no_rank_goes_on_before_all_have_given_their_values() -> None:
    with _ranks(2) as (_, exchanges, pool):
        early = pool.submit(exchanges[1].gather, "early")
        threading.Event().wait(0.3)
        assert not early.done()
        assert exchanges[0].gather("late") == ["late", "early"] == early.result(timeout=20)


def test_the_store_keeps_no_more_than_the_last_list() -> None:
    with _ranks() as (host, exchanges, pool):
        before = host.num_keys()
        for _ in range(5):
            for future in [pool.submit(exchange.gather, "x" * 1000) for exchange in exchanges]:
                future.result(timeout=20)
        assert host.num_keys() == before + 1


def test_a_rank_that_takes_no_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_exchange, "_LIMIT", timedelta(seconds=2.0))
    with _ranks() as (_, exchanges, pool):
        gathered = [pool.submit(exchange.gather, 0) for rank, exchange in enumerate(exchanges) if rank != 2]
        with pytest.raises(RuntimeError, match="rank 2 did not take part in exchange 1"):
            gathered[0].result(timeout=20)


class _Command:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("packs", [lambda form: form, zlib.compress], ids=["for rank 0", "for the others"])
def test_what_a_stranger_writes_runs_nothing(packs: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A process that reaches the store writes an entry in place of a rank."""
    form = packs(pickle.dumps([pickle.dumps(_Command(tmp_path / "ran"))]))
    with _ranks(2) as (host, exchanges, pool):
        reader = 0 if packs is not zlib.compress else 1
        key = "1_1" if reader == 0 else "1_all"
        host.set(f"exchange/{key}", form)  # type: ignore[arg-type]  # bytes are missing in torch's stubs
        with pytest.raises(ValueError, match="sent bytes that are no value"):
            pool.submit(exchanges[reader].gather, "value").result(timeout=20)
    assert not (tmp_path / "ran").exists()
