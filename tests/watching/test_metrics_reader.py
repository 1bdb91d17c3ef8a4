"""Metrics that are read: lines that are whole, starts after one another, and files of ranks."""

import io
import json
from pathlib import Path

from rich.console import Console

from nxdpp.watching.frame import frame
from nxdpp.watching.metrics_reader import RECENT, RunMetrics
from nxdpp.watching.summary import summary_of
from tests.watching.runs import STARTED, about, begin, lines, step, whole_run


def test_a_torn_line_and_strange_ones_are_left_out(tmp_path: Path) -> None:
    """The lines of a process that is killed in a write, and of its next start."""
    path = lines(tmp_path, 0, begin(0), step(0, 1))
    with path.open("a") as file:
        file.write('{"time": 1, "step": 2, "lo\n[]\nnull\n{"step": 9}\n{"time": 1, "step": 2, "loss": "low"}\n')
    lines(tmp_path, 0, begin(0, done=1), step(0, 2))
    assert RunMetrics(tmp_path).curves()["loss"] == [(1, 4.0), (2, 2.0)]


WRONG = [
    '{"time": 2, "step": 1%s, "loss": 9}' % ("0" * 5000),
    '{"time": 2, "step": 2, "loss": %s' % ("[" * 100_000),
    '{"time": 2, "step": "two", "loss": 9}',
    '{"time": 2, "step": 2, "busy": NaN, "loss": 9}',
    '{"time": Infinity, "fault": "no"}',
    '{"time": 2, "begins": true, "ranks": "all", "stages": [0], "done": 0}',
    '{"time": 2, "step": 2, "actions": [["0F0", Infinity, 1]]}',
    '{"time": 2, "step": 2, "experts": [{}, []]}',
]


def test_lines_of_wrong_types_harm_nothing(tmp_path: Path) -> None:
    path = whole_run(tmp_path, 1) / "metrics" / "rank0000.jsonl"
    with path.open("a") as file:
        file.write("\n".join([*WRONG, ""]))
    lines(tmp_path, 0, step(0, 3))
    summary = summary_of(RunMetrics(tmp_path), 0.0)
    assert json.dumps(summary, allow_nan=False)
    assert summary["curves"]["loss"] == [(1, 4.0), (3, 4.0 / 3)]
    Console(file=io.StringIO()).print(frame(summary, Console(file=io.StringIO())))


def test_a_file_that_was_made_anew_is_read_from_its_begin(tmp_path: Path) -> None:
    run = RunMetrics(whole_run(tmp_path))
    path = tmp_path / "metrics" / "rank0000.jsonl"
    path.unlink()
    run.read_on()
    assert len(run.curves()["loss"]) == 20
    # Longer than the earlier file at once, and then shorter by truncation.
    lines(tmp_path, 0, begin(0) | {"time": 7.0}, *[step(0, number, loss=1.0) for number in range(1, 61)])
    run.read_on()
    assert run.curves()["loss"] == [(number, 1.0) for number in range(1, 61)]
    path.write_text("")
    lines(tmp_path, 0, begin(0) | {"time": 7.0}, step(0, 1))
    run.read_on()
    assert run.curves()["loss"] == [(1, 4.0)]


def test_a_resumed_start_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    lines(tmp_path, 0, begin(0), *[step(0, number) for number in range(1, 8)], {"time": 1, "fault": "it fell"})
    run = RunMetrics(tmp_path)
    assert run.ranks[0].fault == "it fell"
    assert [number for number, _ in run.curves()["loss"]] == list(range(1, 8))

    lines(tmp_path, 0, begin(0, done=4), step(0, 5, loss=0.25))
    run.read_on()
    assert run.ranks[0].fault is None
    assert run.curves()["loss"][-2:] == [(4, 1.0), (5, 0.25)]
    assert RunMetrics(tmp_path).curves() == run.curves()


def test_the_loss_is_the_mean_over_ranks_where_the_first_has_none(tmp_path: Path) -> None:
    for rank, loss in ((0, {}), (1, {"loss": 1.0}), (2, {}), (3, {"loss": 2.0})):
        values = {name: value for name, value in step(rank, 1).items() if name != "loss"}
        lines(tmp_path, rank, begin(rank, 4), values | loss)
    assert RunMetrics(tmp_path).curves()["loss"] == [(1, 1.5)]


def test_a_long_run_is_kept_in_few_values(tmp_path: Path) -> None:
    run = RunMetrics(whole_run(tmp_path, 2 * RECENT + 20))
    assert list(run.ranks[1].curves) == []
    assert [len(rank.busy) for rank in run.ranks.values()] == [RECENT, RECENT]
    assert list(run.ranks[0].actions) == [50, 60]
    assert run.ranks[1].about == about(1) | {"done": 0, "steps": 40} | STARTED
