"""The share of a step in which a rank computed, and the times of its actions."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.schedules.actions import parse_action

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that does not run: its time, in nanoseconds, is the one number of the list."""
    now = [100]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return now


@contextmanager
def _block(timer: StepTimer, action: str) -> Iterator[None]:
    start = timer.stamp()
    yield
    timer.blocks.append((*parse_action(action)[:3], start, timer.stamp()))


def test_stamps_and_the_origin_are_the_hosts_time(clock: list[int]) -> None:
    device_clock = device_of(CPU)
    start, at = device_clock.origin()
    clock[0] += 7

    assert at == 100
    assert device_clock.between(start, device_clock.stamp()) == 7


def test_the_share_the_times_of_the_actions_and_the_seconds_of_a_step(clock: list[int]) -> None:
    timer = StepTimer(CPU)
    assert (timer.seconds, timer.busy_share, timer.action_times) == (0.0, 0.0, [])
    for first in (2, 4):
        timer.start()
        began = clock[0]
        for action, computing in (("0F0", first), ("1W3", 5)):
            with _block(timer, action):
                clock[0] += computing
            clock[0] += 10
        timer.stop()
        clock[0] += 50

        second = began + first + 10
        assert timer.action_times == [("0F0", began, began + first), ("1W3", second, second + 5)]
        assert timer.seconds == pytest.approx(1e-9 * (25 + first))
        assert timer.busy_share == pytest.approx((first + 5) / (first + 25))
    timer.start()
    timer.stop()
    assert timer.busy_share == 0.0
