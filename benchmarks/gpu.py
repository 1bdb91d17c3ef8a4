"""Acceptance of a machine: every schedule on its devices against one process, with times, in one table.

    python benchmarks/gpu.py                 # NCCL, a rank a CUDA device; one device: four ranks of it over gloo
    python benchmarks/gpu.py --device cpu    # gloo on the CPU
    python benchmarks/gpu.py --ranks 2 --json FILE

The command starts its own processes and takes less than 5 minutes. It ends with 1 if a number differs from one
process, and names the case.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.acceptance.cases import Job, Result  # noqa: E402
from benchmarks.report import describe_session, markdown_table  # noqa: E402
from nxdpp.devices import cuda  # noqa: E402

MOST_RANKS, RANKS_OF_ONE_DEVICE = 8, 4
LIMIT_SECONDS = 300
_COLUMNS = ("case", "loss", "gradients", "step (ms)", "one process (ms)", "ratio", "busy (%)", "result")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the acceptance and print its table; exit status 1 for numbers that differ from one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default cuda where it is present")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks, 2 or more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures of each rank as JSON")
    asked = parser.parse_args(arguments)
    if asked.ranks is not None and asked.ranks < 2:
        parser.error(f"--ranks {asked.ranks} must be at least 2")
    found = cuda.find()
    if found.problem is not None or (asked.device == "cuda" and not found.count):
        parser.error(f"{found.problem or found.absent}. --device cpu runs the same on the CPU.")
    job = job_of(asked.device or ("cuda" if found.count else "cpu"), found.count, asked.ranks)
    started = time.monotonic()
    session = describe_session()
    results = run(job)
    rows = [row(of_case) for of_case in zip(*results, strict=True)]
    print(f"{job.ranks} ranks on {job.device} over {job.backend}: {time.monotonic() - started:.0f} s")
    print(", ".join(f"{name} {value}" for name, value in session.items()))
    print(markdown_table(_COLUMNS, rows, ("case", "result")))
    if asked.json is not None:
        figures = [[vars(result) for result in of_rank] for of_rank in results]
        asked.json.write_text(json.dumps({"session": session, "job": job._asdict(), "ranks": figures}, indent=1))
    if any(not result.passes for of_rank in results for result in of_rank):
        sys.exit(1)


def job_of(device: str, visible: int, ranks: int | None) -> Job:
    """Return the job for a device type with ``visible`` devices."""
    if device == "cpu":
        return Job(ranks or RANKS_OF_ONE_DEVICE, "gloo", "cpu")
    if visible == 1 or (ranks or 0) > visible:
        # Over gloo the ranks may share a device.
        return Job(ranks or RANKS_OF_ONE_DEVICE, "gloo", "cuda:0")
    return Job(ranks or min(visible, MOST_RANKS), "nccl", "cuda")


def run(job: Job) -> list[list[Result]]:
    """Return the results of each rank; ``SystemExit`` with their output if one fails or the limit is over."""
    with tempfile.TemporaryDirectory(prefix="nxdpp-gpu-") as folder:
        processes = [_start(job, rank, Path(folder), port) for port in [_free_port()] for rank in range(job.ranks)]
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            for rank, process in enumerate(processes):
                if process.wait(max(0.0, deadline - time.monotonic())):
                    sys.exit(f"rank {rank} ended with {process.returncode}; its error is above")
        except subprocess.TimeoutExpired:
            sys.exit(f"the acceptance has not ended after {LIMIT_SECONDS} s")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        files = [Path(folder) / f"{rank}.json" for rank in range(job.ranks)]
        return [[Result(**result) for result in json.loads(file.read_text())] for file in files]


def row(of_ranks: Sequence[Result]) -> list[str]:
    """Return the line of a case: the slowest rank, the largest difference."""
    first = of_ranks[0]
    name = f"{first.schedule}, {first.replicas} replicas" if first.replicas > 1 else first.schedule
    losses = [result.loss for result in of_ranks if result.loss is not None]
    step, alone = max(result.seconds for result in of_ranks), max(result.alone for result in of_ranks)
    busy = sum(result.busy for result in of_ranks) / len(of_ranks)
    return [
        name if first.trains else f"{name}, run_eval",
        _shown(max(losses)),
        _shown(max(result.gradients for result in of_ranks)) if first.trains else "",
        f"{1e3 * step:.1f}",
        f"{1e3 * alone:.1f}",
        f"{alone / step:.2f}",
        f"{100 * busy:.0f}",
        "passed" if all(result.passes for result in of_ranks) else "FAILED",
    ]


def _shown(difference: float) -> str:
    return "equal" if difference == 0 else f"{difference:.1e}"


def _start(job: Job, rank: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    # Sums of cuBLAS are in one order with this workspace.
    own = {name: str(value) for name, value in (numbers | given).items()} | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "benchmarks.acceptance.cases", json.dumps(job), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **own}, stdout=sys.stderr)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
