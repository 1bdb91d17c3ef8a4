"""Program of the processes in ``test_failure_watch``: runs a way to fail or to end normally by its name."""

import os
import sys
import time

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch


def _fails_now() -> None:
    time.sleep(0.5)
    print(f"fails at {time.time()}", flush=True)


def _wait_in_receive(rank: int, source: int) -> None:
    dist.recv(torch.empty(1), src=source)


def raise_in_one(failing: int) -> None:
    """One rank raises; each other rank waits for a message of its neighbour."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == failing:
        _fails_now()
        error = ValueError("the first error")
        error.add_note("stage 1, 1F3")
        raise error
    _wait_in_receive(rank, (rank + 1) % world_size)


def report_then_unwind_slowly(failing: int) -> None:
    """Like the engine, the failing rank reports the error and raises it later."""
    if dist.get_rank() == failing:
        _fails_now()
        error = ValueError("the first error")
        failure_watch.report(error)
        time.sleep(1.0)
        raise error
    while True:
        time.sleep(0.01)


def end_apart(first: int) -> None:
    """All ranks end normally, seconds apart; the last ones still communicate after the first has ended."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = dist.new_group([other for other in range(world_size) if other != first])
    if rank != first:
        time.sleep(2.5)
        value = torch.ones(1)
        dist.all_reduce(value, group=others)
        assert value.item() == world_size - 1
        time.sleep(0.5 * rank)
    print(f"rank {rank} ends well at {time.time()}", flush=True)


def main() -> None:
    """Run ``watched_program.py NAME RANK``."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    globals()[sys.argv[1]](int(sys.argv[2]))


if __name__ == "__main__":
    main()
