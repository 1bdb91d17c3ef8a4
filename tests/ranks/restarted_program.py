"""Program that ``torchrun`` restarts: one rank has another fault in each start, and the last start is clean.

Run as ``restarted_program.py FOLDER FAULT ...``. The start number N has the Nth fault, on rank ``N % world size``.
FOLDER has a file for each fault that has been: the restart counts of two hosts may differ.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange

_ROUNDS = 5


def have(fault: str, noted_in: Path) -> None:
    """End this rank by ``fault``."""
    noted_in.touch()
    if fault == "exception":
        raise ValueError("a fault")
    if fault == "exit":
        sys.exit(3)
    if fault == "os_exit":
        os._exit(4)
    os.kill(os.getpid(), signal.Signals[fault])
    # A signal may come a moment later.
    time.sleep(10)


def main() -> None:
    folder, faults = Path(sys.argv[1]), sys.argv[2:]
    start = len(list(folder.iterdir()))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulty = rank == start % world_size and start < len(faults)
    if faulty and faults[start].startswith("early_"):
        have(faults[start].removeprefix("early_"), folder / faults[start])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    for number in range(_ROUNDS):
        if faulty and number == 2:
            print(f"start {start}: rank {rank} has {faults[start]}", flush=True)
            have(faults[start], folder / faults[start])
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=parallel_state.get_pipeline_model_parallel_group())
        assert value.item() == sum(range(world_size))
        assert Exchange().gather((start, rank)) == [(start, other) for other in range(world_size)]
    print(f"start {start}: rank {rank} ends well", flush=True)


if __name__ == "__main__":
    main()
