"""No thread of a rank asks for entries once the rank has said that it no longer needs the store."""

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in its __all__

from nxdpp.ranks.faults.watch_connection import WatchConnection
from nxdpp.ranks.faults.watch_store import Departure, Ending, WatchStore


class SlowStore(HashStore):
    """A store whose sums are told late: the host may end as soon as it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.goes_on = threading.Event(), threading.Event()
        self.asked_afterwards = 0

    def add(self, key: str, number: int) -> int:
        total = int(super().add(key, number))
        self.counts.set()
        assert self.goes_on.wait(10)
        return total

    def check(self, keys: list[str]) -> bool:
        self.asked_afterwards += self.counts.is_set()
        return bool(super().check(keys))


def test_a_thread_asks_nothing_during_and_after_the_last_request() -> None:
    store = SlowStore()
    watch = WatchStore(store)
    last = threading.Thread(target=watch.finish)
    last.start()
    assert store.counts.wait(10)
    errors: list[Exception] = []

    def look() -> None:
        try:
            watch.state()
        except RuntimeError as error:
            errors.append(error)

    other = threading.Thread(target=look)
    other.start()
    store.goes_on.set()
    last.join(10)
    other.join(10)
    assert "last request" in str(errors[0])
    assert store.asked_afterwards == 0


@pytest.mark.parametrize("last", ["finish", "leave"])
def test_each_request_is_refused_after_the_last(last: str) -> None:
    watch = WatchStore(HashStore())
    assert watch.end(Ending("fault", 1)).rank == 1
    watch.finish() if last == "finish" else watch.leave(Departure(1, {}, ""))
    for request in (watch.state, watch.answer, watch.departures, watch.is_printed, watch.number_of_processes):
        with pytest.raises(RuntimeError, match="last request"):
            request()


def test_requests_are_those_of_a_store() -> None:
    connection = WatchConnection(HashStore())
    assert (connection.add("count", 2), connection.add("count", 0)) == (2, 2)
    assert not connection.check(["entry"])
    assert connection.compare_set("entry", "", "a") == b"a"
    assert connection.compare_set("entry", "b", "c") == b"a"
    connection.set("entry", "d")
    assert connection.check(["entry", "count"])
    assert connection.get("entry") == b"d"


def test_a_store_whose_process_has_ended_is_not_asked() -> None:
    connection = WatchConnection(HashStore())
    connection.set("entry", "a")
    connection.host_has_ended = lambda: True
    with pytest.raises(RuntimeError, match="has ended"):
        connection.get("entry")
