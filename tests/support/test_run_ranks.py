"""``run_ranks`` itself: results return unchanged, and every failure is reported."""

import os
import signal
import sys
import time

import pytest

from tests.support.run_ranks import run_ranks


def _raise_on_some(rank: int) -> None:
    print(f"rank {rank} was here")
    if rank in (1, 2):
        raise ValueError(f"no good on {rank}")
    time.sleep(60)


def test_the_message_has_every_error_and_the_running_ranks() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, _raise_on_some)
    assert time.monotonic() - start < 10
    told = str(caught.value)
    assert "ValueError: no good on 1" in told
    assert "ValueError: no good on 2" in told
    assert "rank 0: still running" in told
    assert "in _raise_on_some" in told.split("rank 0: still running")[1].split("---- rank 1:")[0]
    assert "rank 0 was here" in told


def _die(rank: int) -> None:
    if rank == 1:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_the_message_has_a_dead_rank_and_its_output() -> None:
    with pytest.raises(AssertionError, match="SIGKILL") as caught:
        run_ranks(2, _die)
    assert "last words" in str(caught.value)


def _sleep_on_rank_one(rank: int) -> int:
    time.sleep(60 * rank)
    return rank


def test_a_timeout_names_the_running_ranks() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"timeout after 1\.0 s: rank 1 still running") as caught:
        run_ranks(2, _sleep_on_rank_one, timeout=1.0)
    assert time.monotonic() - start < 5
    assert "rank 0: returned, ended" in str(caught.value)
