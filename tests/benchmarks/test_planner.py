"""The planner's accuracy on a tiny Llama: memory of measured ranks, and the figures of the tables."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import planner_accuracy
from benchmarks.layouts.job import Shape
from benchmarks.planner import published
from benchmarks.planner.layouts import LAYOUTS, SHAPE, describe
from benchmarks.planner.measure import Measured
from benchmarks.planner.tables import Row, figures, figures_table, rank_correlation, rows_table
from nxdpp.planning.layout import Layout
from nxdpp.planning.measured.kept_machine import KeptMachine

TINY = Shape(hidden=64, middle=128, layers=4, heads=4, vocabulary=256, batch=1, length=32, microbatches=4)
SPEED = KeptMachine(
    "cpu",
    {"cores": 2, "threads": 1, "ranks": 2},
    {"flops_2": 5e10, "flops_4": 5e10, "bandwidth": 1e10, "operation": 2e-6, "action": 1e-4, "latency": 1e-4}
    | dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "message_rate"), 1e9)
    | {"message_latency": 1e-4},
)
TWO_RANKS = (
    Layout(tensor=2, sequence=True),
    Layout(pipeline=2, schedule="zb-v", chunks=2),
    Layout(pipeline=2, checkpoint=True),
)
SHARDED = tuple(Layout(data=2, zero=zero) for zero in (1, 2, 3))


# planning/test_predict compares memory in the suite, and measured/test_kept_machine the figures of a machine.
# How long an exchange holds a bucket, and so the peak with ZeRO-1, depends on the load of the machine.
@pytest.mark.sweep
@pytest.mark.parametrize("layouts", [TWO_RANKS, SHARDED])
def test_the_memory_of_measured_ranks_is_predicted(layouts: tuple[Layout, ...]) -> None:
    """Times depend on the load of the machine: the benchmark compares them."""
    rows = planner_accuracy.compare(layouts, TINY, SPEED, rounds=1, steps=1)

    assert [row.prediction.layout for row in rows] == list(layouts)
    for row in rows:
        assert len(row.ranks) == 2
        assert row.seconds > 0
        # In a tiny model a message or a mask is a large share. With ZeRO-1 a slow exchange holds a bucket longer.
        most = 1.3 if row.prediction.layout.zero else 1.15
        assert 0.85 < row.memory_ratio < most, describe(row.prediction.layout)
    assert all(describe(layout) in rows_table(rows) for layout in layouts)


def test_the_memory_under_autocast_is_predicted() -> None:
    """Weights are converted once a step, activations in each microbatch."""
    layouts = (Layout(pipeline=2), Layout(pipeline=2, checkpoint=True), Layout(tensor=2))

    rows = planner_accuracy.compare(layouts, TINY, SPEED, rounds=1, steps=1, autocast=torch.bfloat16)

    for row in rows:
        assert 0.9 < row.memory_ratio < 1.1, describe(row.prediction.layout)


def test_the_layouts_are_enough_and_fit_two_and_four_ranks() -> None:
    assert len(LAYOUTS) == len(set(LAYOUTS)) >= 24
    assert {layout.devices for layout in LAYOUTS} == {2, 4}
    predictions = planner_accuracy.predict_all(LAYOUTS[:1], SHAPE, SPEED)
    assert predictions[0].step_seconds > 0


def test_the_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 beside 1, 3, 2, 4.
    assert rank_correlation([1, 2, 2, 4], [10, 30, 20, 40]) == pytest.approx(0.9487, abs=1e-4)


def test_figures_are_those_of_the_layouts() -> None:
    quick, slow = planner_accuracy.predict_all((Layout(pipeline=2), Layout(pipeline=2, checkpoint=True)), TINY, SPEED)
    peaks = [round(rank.total) for rank in quick.memory]
    of_quick = [Measured(0, peaks[0], [3.0, 4.0, 9.0]), Measured(1, round(1.07 * peaks[1]), [2.0, 2.0, 2.0])]
    of_slow = [Measured(stage, round(rank.total), [2.0, 2.0, 2.0]) for stage, rank in enumerate(slow.memory)]

    rows = [Row(quick, of_quick), Row(slow, of_slow)]

    # The slower rank of each step: 3, 4, 9.
    assert rows[0].seconds == 3.0
    assert rows[0].memory_ratio == pytest.approx(1.07, abs=1e-4)
    found = figures(rows)
    assert (found.layouts, found.chosen) == (2, 1.5)
    assert found.correlation == pytest.approx(-1)
    assert found.memory == pytest.approx(0.07, abs=1e-4)
    assert "1.50" in figures_table(rows)


def _published_rows() -> list[list[str]]:
    """Cells of the page's table of published runs."""
    page = (Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "planner.md").read_text()
    block = page.partition("<!-- published -->")[2].partition("<!-- end of published -->")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")][2:]


def test_published_runs_of_our_recipe_are_predicted_within_15_percent() -> None:
    """The page has all runs. One of them is predicted again."""
    rows = _published_rows()

    expected = [(run.name, f"{name}, {chunks}") for run in published.RUNS for name, chunks in run.schedules]
    assert [(row[0], row[2]) for row in rows] == expected
    same = [float(row[5]) for row in rows if row[-1].startswith("same")]
    assert len(same) >= 16
    assert all(0.85 <= ratio <= 1.15 for ratio in same)
    run = next(run for run in published.RUNS if run.model == "6.2B")
    ((schedule, _),) = run.schedules
    ratio = published.predicted(run, replace(run.layout, schedule=schedule)).step_seconds / run.seconds
    (printed,) = (float(row[5]) for row in rows if (row[0], row[2]) == (run.name, f"{schedule}, 1"))
    assert ratio == pytest.approx(printed, abs=0.006)


@pytest.mark.parametrize(
    ("schedule", "without"), [("1f1b", 0.83), pytest.param("interleaved", 0.85, marks=pytest.mark.sweep)]
)
def test_the_memory_of_the_published_405b_is_predicted(schedule: str, without: float) -> None:
    """The page has the bytes with the logits that another runtime keeps, and the ratio without them in its text."""
    runs = [run for run in published.RUNS if run.model == "405B" and run.memory]
    ((run, chunks),) = [(each, count) for each in runs for name, count in each.schedules if name == schedule]
    (row,) = [row for row in _published_rows() if (row[0], row[2]) == (run.name, f"{schedule}, {chunks}")]

    found = published.predicted(run, replace(run.layout, schedule=schedule, chunks=chunks))

    (gib,) = run.memory
    bytes_ = published.reserved(found, run.kept) / 2**30
    assert row[6:9] == [f"{gib:.1f}", f"{bytes_:.1f}", f"{bytes_ / gib:.2f}"]
    assert published.reserved(found) / 2**30 / gib == pytest.approx(without, abs=0.005)
    assert row[5] == f"{found.step_seconds / run.seconds:.2f}"


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planner_accuracy.main(["--rounds", "0"])
    assert "--rounds 0 must be at least 1" in capsys.readouterr().err
