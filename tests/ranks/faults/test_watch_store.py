"""The first ending is final, and a roll call ends by a judgement."""

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks.faults.watch_store import Departure, Ending, RollCall, WatchStore, pause_seconds, poll_seconds


def test_the_first_ending_is_final() -> None:
    store = WatchStore(HashStore())
    assert store.state() is None
    first = Ending("fault", 2, "rank 2 died", [2])
    assert store.end(first) == first
    assert store.end(Ending("error", 1)) == first
    assert store.state() == first
    assert store.open_roll_call(0) is None


def test_an_ending_replaces_a_roll_call() -> None:
    store = WatchStore(HashStore())
    call = store.open_roll_call(0)
    assert call == RollCall(1, 0)
    assert store.open_roll_call(3) is None, "another rank's roll call is open"
    ending = Ending("error", 1)
    assert store.end(ending) == ending
    store.close_roll_call(call)
    assert store.state() == ending


def test_roll_calls_are_numbered_and_hold_an_answer_of_each_rank() -> None:
    store = WatchStore(HashStore())
    first = store.open_roll_call(0)
    assert first is not None
    store.answer_roll_call(first, 0, {"position": "run_train step 1"})
    assert store.number_of_answers(first) == 1
    assert store.answer_of(first, 0) == {"position": "run_train step 1"}
    assert store.answer_of(first, 1) is None
    store.close_roll_call(first, goes_on=True)
    assert store.state() == RollCall(1, 0, is_open=False, goes_on=True)
    second = store.open_roll_call(1)
    assert second == RollCall(2, 1)
    assert store.number_of_answers(second) == 0


def test_departures_and_processes_are_listed_once() -> None:
    entries = HashStore()
    store = WatchStore(entries)
    assert store.departures() == {}
    departure = Departure(2, {"world": 0, "pipeline": 17}, "run_train step 17")
    WatchStore(entries).leave(departure)
    assert store.departures() == {2: departure}
    assert (store.answers(), store.finished()) == (1, 1)
    store.add_process("here", {"rank": 0, "process": 7, "started": 1})
    store.add_process("there", {"rank": 1, "process": 8, "started": 1})
    assert store.number_of_processes() == 2
    assert [entry["rank"] for entry in store.processes("here", 0)] == [0]
    assert store.processes("here", 1) == []


@pytest.mark.parametrize(("ranks", "poll", "pause"), [(4, 0.5, 0.05), (512, 2.0, 0.2048), (2048, 2.0, 0.8192)])
def test_ranks_together_ask_the_store_at_a_rate_that_it_can_answer(ranks: int, poll: float, pause: float) -> None:
    assert poll_seconds(ranks) == poll
    assert pause_seconds(ranks) == pytest.approx(pause)
    assert ranks / pause_seconds(ranks) <= 2500
