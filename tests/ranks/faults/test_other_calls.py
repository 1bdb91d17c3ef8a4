"""Ranks in different calls are told apart by the calls' numbers; ranks in the same call never are."""

from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks.faults.board import Board
from nxdpp.ranks.faults.other_calls import OtherCalls
from nxdpp.ranks.faults.watch_store import WatchConnection


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


def test_ranks_in_the_same_call_are_not_told_apart() -> None:
    store = HashStore()
    ranks = [Rank(store, rank, [0, 1]) for rank in range(2)]
    # Rank 1 is a call behind, and slow.
    ranks[0].make("run_train", "run_eval")
    ranks[1].make("run_train")
    slow = ranks[1].begin("run_eval")
    ranks[0].begin("save_pretrained")
    for _ in range(3):
        assert [rank.find() for rank in ranks] == [None, None]
    slow.__exit__(None, None, None)
    ranks[1].begin("save_pretrained")
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
