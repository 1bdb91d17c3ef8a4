"""Ranks in different calls are told apart by the calls' numbers; ranks in the same call never are."""

import threading
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks.faults.board import Board
from nxdpp.ranks.faults.other_calls import OtherCalls
from nxdpp.ranks.faults.watch_connection import WatchConnection


class CountingStore(HashStore):
    """A store that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return bool(super().check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests += 1
        return bytes(super().compare_set(key, expected, desired))


class Rank:
    """A rank of a pipeline, with its board."""

    def __init__(self, store: Any, rank: int, pipeline: list[int]) -> None:
        self.board = Board()
        self.board.members = {"pipeline": frozenset(pipeline)}
        self.calls = OtherCalls(WatchConnection(store), self.board, rank, seconds=0.0)
        self.find = self.calls.find

    def begin(self, name: str) -> Any:
        steps = name in ("run_train", "run_eval")
        call = self.board.call(name, "step", "pipeline") if steps else self.board.call(name)
        call.__enter__()
        return call

    def make(self, *names: str) -> None:
        for name in names:
            self.begin(name).__exit__(None, None, None)


def test_a_rank_in_save_pretrained_and_one_in_run_train() -> None:
    store = HashStore()
    first, second = Rank(store, 0, [0, 1]), Rank(store, 1, [0, 1])
    for rank in (first, second):
        rank.make("run_train", "run_eval", "run_train")
    first.begin("save_pretrained")
    assert first.find() is None
    assert second.find() is None, "it is outside of calls"
    second.begin("run_train")
    expected = "rank 0 is in save_pretrained, rank 1 in run_train step 3: each waits for the other."
    assert str(second.find()).startswith(expected)


@pytest.mark.parametrize("name", ["run_train", "save_pretrained", "run_eval"])
def test_ranks_in_the_same_call_are_not_told_apart(name: str) -> None:
    store = CountingStore()
    ranks = [Rank(store, rank, [0, 1]) for rank in range(2)]
    # Rank 1 is a call behind, and slow.
    ranks[0].make("run_train", "run_eval")
    ranks[1].make("run_train")
    slow = ranks[1].begin("run_eval")
    ranks[0].begin(name)
    for _ in range(3):
        assert [rank.find() for rank in ranks] == [None, None]
    slow.__exit__(None, None, None)
    ranks[1].begin(name)
    assert [rank.find() for rank in ranks] == [None, None]


def test_replicas_are_compared_by_calls_of_all_ranks() -> None:
    store = HashStore()
    first, second = Rank(store, 0, [0]), Rank(store, 1, [1])
    for rank in (first, second):
        rank.make("move_model_to_device", "run_train")
    # One replica may evaluate alone.
    first.make("run_eval", "run_eval")
    first.begin("save_pretrained")
    assert first.find() is None
    second.begin("run_train")
    assert str(second.find()).startswith("rank 0 is in save_pretrained, rank 1 in run_train step 2")


def test_a_replica_that_is_a_step_behind_is_slow_only() -> None:
    store = HashStore()
    first, second = Rank(store, 0, [0]), Rank(store, 1, [1])
    first.make("run_train", "run_train")
    second.make("run_train")
    first.begin("save_pretrained")
    second.begin("run_train")
    assert [rank.find() for rank in (first, second, first, second)] == [None] * 4


def test_two_calls_of_all_ranks() -> None:
    store = HashStore()
    first, second = Rank(store, 0, [0]), Rank(store, 1, [1])
    first.begin("save_pretrained")
    second.begin("load_pretrained")
    assert first.find() is None
    assert str(second.find()).startswith("rank 0 is in save_pretrained, rank 1 in load_pretrained")


def test_a_rank_that_moves_asks_the_store_nothing() -> None:
    store = CountingStore()
    rank = Rank(store, 0, [0, 1])
    rank.calls = OtherCalls(WatchConnection(store), rank.board, 0, seconds=0.2)
    rank.begin("run_train")
    for _ in range(3):
        rank.board.moved()
        assert rank.calls.find() is None
    assert store.requests == 0
    threading.Event().wait(0.25)
    assert rank.calls.find() is None
    assert store.requests > 0
