"""The comparison with torch.distributed.pipelining: its layers, verdicts and tables, and a small run."""

import json
import math
import re
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.comparison import page
from benchmarks.comparison.contenders import BY_HAND, NXDPP, TORCH
from benchmarks.comparison.efficiency import excess_rows, ideal_ms, sleeping_job
from benchmarks.comparison.job import Job
from benchmarks.comparison.overhead import targets
from benchmarks.comparison.rows import Entrant, Row, Verdict, rows_as_json, rows_as_markdown
from benchmarks.comparison.stacks import ScalingLayer, SleepingLayer, stack_job
from benchmarks.comparison.timing import Effort, Times, time_families
from benchmarks.report import describe_session
from nxdpp.ranks import parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.support.run_ranks import run_ranks


def test_a_sleeping_layer_sleeps_once_for_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    layer = SleepingLayer(0.005, 3)
    hidden = torch.rand(2, 3, requires_grad=True)
    output = layer(hidden).sum()
    assert slept == [0.005]
    torch.autograd.grad(output, hidden, retain_graph=True)
    assert slept == [0.005] * 2
    torch.autograd.grad(output, layer.weight, retain_graph=True)
    assert slept == [0.005] * 3
    output.backward()
    assert slept == [0.005] * 5


def test_ideal_of_1f1b_counts_sleeps_only() -> None:
    assert ideal_ms("1f1b", 5, 32) == 525


def test_efficiency_rows_compare_the_excess_over_the_ideal() -> None:
    times = {
        (BY_HAND, "1f1b"): Times([0.545, 0.545], []),
        (TORCH, "1f1b"): Times([0.565, 0.565], []),
        (NXDPP, "1f1b"): Times([0.548, 0.548], []),
    }
    rows = excess_rows(5, 32, times)
    assert [row.quartiles[1] for row in rows] == pytest.approx([20, 40, 23])
    torch_verdict, by_hand, ideal = rows[2].verdicts
    assert [v.ratio for v in (torch_verdict, by_hand, ideal)] == pytest.approx([23 / 40, 23 / 20, 548 / 525])
    assert [v.met for v in (torch_verdict, by_hand, ideal)] == [True, None, None]


def test_a_rank_sleeps_as_long_with_two_stages() -> None:
    assert ideal_ms("interleaved", 5, 32) == 502.5
    assert sleeping_job(6, 2, 2).make_model().layers[0].seconds == 0.003  # type: ignore[index,union-attr]
    times = {(NXDPP, "1f1b"): Times([0.54], []), (NXDPP, "interleaved"): Times([0.55], [])}
    assert excess_rows(5, 32, times)[1].verdicts[-1].met is False


def test_overhead_targets() -> None:
    assert targets(2, "wall", NXDPP, "1f1b") == {(BY_HAND, "1f1b"): None, (TORCH, "1f1b"): 0.8}
    assert targets(4, "wall", NXDPP, "1f1b") == {(BY_HAND, "1f1b"): 0.75, (TORCH, "1f1b"): None}
    assert targets(4, "wall", NXDPP, "zb-v")[TORCH, "zb-v"] == 0.5
    assert targets(4, "CPU", NXDPP, "zb-v")[TORCH, "zb-v"] is None
    assert targets(4, "wall", TORCH, "1f1b") == {}


def test_a_missed_target_shows_in_table_and_json() -> None:
    row = Row("efficiency", "5 ms", "1f1b", NXDPP, "ms", [49.0, 50.0, 51.0], [Verdict(TORCH, 0.7, 0.6)])
    session = {**describe_session(), **Effort(1, 3)._asdict()}
    (written,) = json.loads(rows_as_json([row], session))["rows"]
    assert written["verdicts"][0]["met"] is False
    assert [written[name] for name in ("low", "median", "high")] == [49.5, 50.0, 50.5]
    text = " ".join(rows_as_markdown([row], session).split())
    assert "| 1f1b | nxdpp | 50 | 49.5 to 50.5 | ms | 0.7 x torch (at most 0.6: NOT met) |" in text
    assert "0 of 1 targets are met." in text


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


def test_sleep_does_not_change_gradients() -> None:
    asleep, awake = (sleeping_job(ms, 2, 1).reference() for ms in (1, 0))
    assert torch.equal(asleep[0], awake[0])
    assert all(torch.equal(asleep[1][name], awake[1][name]) for name in awake[1])


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
