"""What one message between two ranks of a machine costs over gloo, after both have slept for a while.

    python benchmarks/hop.py

Prints the median microseconds from the sender's call until the receiver, whose receive was posted before, has the
value, and those for which the call keeps the sender.
"""

import sys
import time
from pathlib import Path
from statistics import median

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.compare.layers import wake_up_in_time  # noqa: E402
from nxdpp.parallel_layers import parallel_state  # noqa: E402
from tests.support.run_ranks import run_ranks  # noqa: E402

IDLE_MS = (0, 5, 20)
KIBIBYTES = (0.25, 512)
MESSAGES = 60


def main() -> None:
    """Start two ranks, and print a row for each length of sleep and size of message."""
    table = Table("slept", "message", "until it is there", "the call itself", title=f"gloo, torch {torch.__version__}")
    for idle_ms in IDLE_MS:
        for kibibytes in KIBIBYTES:
            hops, calls = run_ranks(2, run_rank, idle_ms / 1e3, int(kibibytes * 256), timeout=120)[0]
            table.add_row(f"{idle_ms} ms", f"{kibibytes} KiB", f"{hops:.0f} µs", f"{calls:.0f} µs")
    Console().print(table)


def run_rank(rank: int, idle: float, elements: int) -> tuple[float, float]:
    """Send to and fro; the median microseconds of a hop and of a call to send. Collective."""
    wake_up_in_time()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wake_up_in_time()
    peer = 1 - rank
    value, sent, arrived, calls = torch.ones(elements), [], [], []
    for _ in range(MESSAGES):
        receive = dist.irecv(torch.empty(elements), peer)
        if rank == 1:
            receive.wait()
            arrived.append(time.perf_counter())
        time.sleep(idle)
        sent.append(time.perf_counter())
        send = dist.isend(value, peer)
        calls.append(time.perf_counter() - sent[-1])
        if rank == 0:
            receive.wait()
            arrived.append(time.perf_counter())
        send.wait()
    everybodys: list[tuple[list[float], list[float], list[float]]] = [([], [], [])] * 2
    dist.all_gather_object(everybodys, (sent, arrived, calls))
    hops = [
        there - here
        for sender in (0, 1)
        for here, there in zip(everybodys[sender][0], everybodys[1 - sender][1], strict=True)
    ]
    return 1e6 * median(hops), 1e6 * median([call for _, _, each in everybodys for call in each])


if __name__ == "__main__":
    main()
