"""``run_ranks`` itself: results return unchanged, and every failure is reported."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.run_ranks import run_ranks


def _sum_of_ranks(rank: int, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    value = weight * (rank + 1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return {"sum": value, "threads": torch.tensor(torch.get_num_threads())}


@pytest.mark.cpu_only("it is about gloo, which is given by name")
def test_results_come_back_in_rank_order_by_value() -> None:
    weight = torch.tensor([1.0, 2.0])
    results = run_ranks(4, _sum_of_ranks, weight)
    for result in results:
        assert torch.equal(result["sum"], weight * 10)
        assert result["threads"] == 1


def _large(rank: int) -> torch.Tensor:
    return torch.full((1_000_000,), float(rank))


def test_a_result_larger_than_a_pipe_comes_back() -> None:
    assert [result[0].item() for result in run_ranks(3, _large)] == [0.0, 1.0, 2.0]


def test_after_the_first_start_four_ranks_start_within_two_seconds() -> None:
    run_ranks(1, abs)
    start = time.monotonic()
    run_ranks(4, abs)
    assert time.monotonic() - start < 2.0


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


def _stop_for_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the first error")
    print("rank 0 stops because rank 1 failed with ValueError: see the traceback of rank 1", flush=True)
    time.sleep(60)


def test_a_rank_that_has_told_why_it_stops_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.run_ranks.GRACE_SECONDS", 30.0)
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 first(.|\n)*rank 0 stops because(.|\n)*the first error"):
        run_ranks(2, _stop_for_rank_one)
    assert time.monotonic() - start < 15


def _die(rank: int, how: str) -> None:
    if rank == 1:
        print("last words", file=sys.stderr, flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    time.sleep(60)


@pytest.mark.parametrize(("how", "told"), [("killed", "SIGKILL"), ("exited", "exit status 3")])
def test_the_message_has_a_dead_rank_and_its_output(how: str, told: str) -> None:
    with pytest.raises(AssertionError, match=told) as caught:
        run_ranks(2, _die, how)
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


def _unpicklable(rank: int) -> object:
    return lambda: rank


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(AssertionError, match="_unpicklable"):
        run_ranks(1, _unpicklable)


def _hang_at_the_end(rank: int) -> None:
    if rank == 1:
        threading.Thread(target=time.sleep, args=(60,), name="lingers").start()


def test_a_rank_that_returns_but_does_not_end_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 still running") as caught:
        run_ranks(2, _hang_at_the_end, timeout=1.0)
    assert "rank 1: returned, still running" in str(caught.value)
