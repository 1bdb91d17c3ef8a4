"""No thread of a rank asks for entries once the rank has said that it no longer needs the store."""

import threading

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in its __all__

from nxdpp.ranks.faults.watch_store import WatchStore


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
