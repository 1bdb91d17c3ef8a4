"""The clock of ``benchmarks/excess.py``: each moment of a thread has one kind."""

import time

import pytest

from benchmarks.excess import REST, SLEEPS, WAITING, Clock, counted_calls


def test_a_call_within_another_counts_for_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock()
    inner = clock.timed(WAITING, lambda: None)
    clock.timed(SLEEPS, inner)()
    assert clock.seconds == {REST: 1.0, SLEEPS: 2.0 + 4.0, WAITING: 3.0}


def test_calls_are_counted_and_restored() -> None:
    slept, clock = time.sleep, Clock()
    with counted_calls(clock):
        time.sleep(0)
    clock.enter(REST)
    assert time.sleep is slept
    assert set(clock.seconds) == {REST, SLEEPS}
