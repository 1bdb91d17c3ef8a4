"""Files, functions, executed lines and calls of a steady training step stay at or below ``step.toml``."""

import tomllib
from pathlib import Path

import pytest

from nxdpp import parallel_state
from tests.support.run_ranks import run_ranks
from tests.support.way_of_a_step import steady_way

FILE = Path(__file__).with_name("step.toml")
MOST = tomllib.loads(FILE.read_text())["most"]


def ways(rank: int) -> dict[str, int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    numbers = steady_way(4).totals
    return {**numbers, "calls_with_24_layers": steady_way(24).totals["calls"]}


@pytest.mark.cpu_only("it counts the calls of a step on the CPU")
def test_a_steady_step_does_no_more() -> None:
    numbers, _ = run_ranks(2, ways)
    over = [f"{numbers[name]} {name}, {most} allowed" for name, most in MOST.items() if numbers[name] > most]
    assert not over, (
        f"a steady step executes {'; '.join(over)}. An event can tell of a change (pipeline/local/changes.py): look "
        f"only then. `torchrun --nproc-per-node 2 benchmarks/way_of_a_step.py --functions` shows each call."
    )
