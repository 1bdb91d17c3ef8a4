"""The comparison with torch.distributed.pipelining: its layers, verdicts and tables, and a small run."""

import math
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.comparison import page
from benchmarks.comparison.contenders import BY_HAND, NXDPP, TORCH
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant, Row, Verdict
from benchmarks.comparison.stacks import ScalingLayer, stack_job
from benchmarks.comparison.timing import Effort, Times, time_families
from nxdpp.ranks import parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.support.run_ranks import run_ranks


def light_rank(rank: int) -> dict[Entrant, Times]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)

    def job(chunks: int) -> Job:
        return stack_job(partial(ScalingLayer, 8), 2 * chunks, (2, 4, 8), 4)

    return time_families(["gpipe", "1f1b", "interleaved", "zb1p", "zb-v", "dualpipe-v"], job, job, Effort(1, 2))


@pytest.mark.cpu_only("the benchmark is one of the CPU")
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.9's own pipelining ends in an error of gloo: 8 bytes received, not 4"
)
def test_all_contenders_compute_the_same_and_are_timed() -> None:
    times = run_ranks(2, light_rank)[0]
    expected = {(BY_HAND, "1f1b"), (TORCH, "1f1b"), (NXDPP, "1f1b"), (TORCH, "gpipe"), (TORCH, "zb-v")}
    assert expected <= set(times)
    for taken in times.values():
        assert len(taken.wall) == len(taken.cpu) == 2
        assert min(taken.wall) > 0


def wrong_rank(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    other = partial(stack_job, partial(ScalingLayer, 8), 2, (2, 4, 8))
    time_families(["1f1b"], lambda chunks: other(4), lambda chunks: other(2), Effort(0, 1))


@pytest.mark.cpu_only("the benchmark is one of the CPU")
def test_a_contender_with_another_result_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"by hand 1f1b: .* differs by"):
        run_ranks(2, wrong_rank)


def test_pages_get_tables_and_a_picture(tmp_path: Path) -> None:
    rows = [
        Row("efficiency", "5 ms, m=32", "1f1b", NXDPP, "ms", [50.0], [Verdict("the ideal 525 ms", 1.1)]),
        Row("efficiency", "5 ms, m=32", "1f1b", TORCH, "ms", [100.0]),
        Row("efficiency", "5 ms, m=32", "1f1b", BY_HAND, "ms", [60.0]),
    ]
    shown = [" ".join(line.split()) for line in page.table(rows).splitlines()]
    assert shown[2:] == ["| 1f1b | 50.0 / 100 (0.50); 1.10 |", "| 1f1b by hand | 60.0 |"]
    page.draw(rows, tmp_path / "picture.svg")
    assert "ms above the ideal" in (tmp_path / "picture.svg").read_text()


def test_names_of_schedules_do_not_overlap_in_the_picture() -> None:
    drawn = page.PICTURE.read_text()
    found = re.findall(r'x="([\d.]+)" y="[\d.]+" transform="rotate\(([-\d.]+) [^>]*>([\w-]+)</text>', drawn)
    names = [(float(x), float(degrees), name) for x, degrees, name in found if name in FAMILIES]
    assert len(names) == 11
    for (before, _, _), (x, degrees, name) in pairwise(names):
        # A name of 9 points ends at its x; lines of names keep the height of a letter between them.
        assert abs(math.sin(math.radians(degrees))) * (x - before) >= 9, name
