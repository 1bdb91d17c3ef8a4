"""Seconds of ``python -m nxdpp plan`` for Llama-3.1-405B, imports included.

    python benchmarks/plan_seconds.py

Each layout runs once to compile the sources, and then ``ROUNDS`` times. Lines have the median.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.llama_405b import llama_3_1_405b  # noqa: E402  # the clone is on the path from here on

ROUNDS = 3
LAYOUTS = {
    "16 stages": "16",
    "126 stages": "126",
}


def main() -> None:
    """Print the wall and the processor seconds of each layout."""
    with tempfile.TemporaryDirectory() as folder:
        config = llama_3_1_405b()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        for name, stages in LAYOUTS.items():
            _seconds(folder, stages)
            rounds = [_seconds(folder, stages) for _ in range(ROUNDS)]
            wall, processor = (statistics.median(times) for times in zip(*rounds, strict=True))
            print(f"{name}: {wall:.2f} s, {processor:.2f} s of processor time")


def _seconds(folder: str, stages: str) -> tuple[float, float]:
    flags = ["--pipeline-parallel-size", stages, "--num-microbatches", "64"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "nxdpp", "plan", folder, *flags],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
