"""The share of a step in which a rank computed."""

import time

import pytest
import torch

from nxdpp.pipeline.runtime.step_timer import StepTimer

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; the time is its one number."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_share_of_all_blocks(clock: list[float]) -> None:
    timer = StepTimer(CPU)
    for busy, idle in ((1.0, 2.0), (3.0, 4.0)):
        with timer:
            clock[0] += busy
        clock[0] += idle
    timer.stop()
    clock[0] += 50.0

    assert timer.busy_share == pytest.approx(0.4)


def test_no_share_before_the_end_and_none_without_time(clock: list[float]) -> None:
    timer = StepTimer(CPU)
    assert timer.busy_share == 0.0

    timer.stop()

    assert timer.busy_share == 0.0


def test_an_idle_and_a_busy_step(clock: list[float]) -> None:
    idle, busy = StepTimer(CPU), StepTimer(CPU)
    with busy:
        clock[0] += 2.0
    idle.stop()
    busy.stop()

    assert idle.busy_share == 0.0
    assert busy.busy_share == 1.0
