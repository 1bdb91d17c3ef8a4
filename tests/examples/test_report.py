"""Metrics of a run beside its checkpoint: those of an earlier run are replaced together with it, whatever is killed."""

import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from nxdpp.devices.device import Compilations, Device

KEYS = ("loss", "tokens_per_second", "compile_seconds")

pytestmark = pytest.mark.usefixtures("one_rank", "written")
# MetricsFile, which has tests of its own, gets no more of it than its figures.
MODEL: Any = None


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """The MetricsFile of the reports."""
    import report

    made = mock.MagicMock()
    monkeypatch.setattr(report, "MetricsFile", lambda *_, **__: made)
    return made


def finished_report(folder: Path, loss: float) -> Any:
    """The report of a run that has done its step."""
    from report import TrainingReport

    with TrainingReport(Console(quiet=True), folder, 1, MODEL) as report:
        report.step_done(1, loss, 10, 0.5)
    return report


def loss_in(file: Path) -> str:
    return str(json.loads(file.read_text())["loss"])


def save(folder: Path, run: str, look: Callable[[], None] = lambda: None) -> None:
    report = finished_report(folder, float(run))
    look()
    with report.saving():
        look()
        (folder / "model.safetensors").write_text(run)
        look()
    look()


@pytest.mark.parametrize("has_metrics", [True, False])
def test_metrics_are_those_of_the_checkpoint_whenever_a_run_is_killed(
    has_metrics: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from report import settle_metrics

    folder = tmp_path / "run"
    copies: list[Path] = []
    folder.mkdir()
    save(folder, "1.0")
    if not has_metrics:
        (folder / "metrics.jsonl").unlink()

    def look() -> None:
        copies.append(tmp_path / f"{len(copies)}")
        shutil.copytree(folder, copies[-1])

    unlink = Path.unlink

    def looking_unlink(self: Path, missing_ok: bool = False) -> None:
        look()
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", looking_unlink)
    save(folder, "2.0", look)
    monkeypatch.undo()

    checkpoints = []
    for copy in copies:
        checkpoints.append((copy / "model.safetensors").read_text())
        metrics = copy / "metrics.jsonl"
        assert not metrics.exists() or loss_in(metrics) == checkpoints[-1]
        settle_metrics(copy)
        assert (loss_in(metrics) if metrics.exists() else "none") == (
            checkpoints[-1] if has_metrics or checkpoints[-1] == "2.0" else "none"
        )
        assert not (copy / "metrics.earlier.jsonl").exists()
    assert checkpoints == ["1.0", "1.0", "2.0", "2.0", "2.0"]
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "model.safetensors"]


def test_a_save_that_fails_leaves_the_earlier_metrics(tmp_path: Path) -> None:
    save(tmp_path, "1.0")
    report = finished_report(tmp_path, 2.0)
    with pytest.raises(OSError, match="no more"), report.saving():
        raise OSError("no more")
    assert loss_in(tmp_path / "metrics.jsonl") == "1.0"


@pytest.mark.parametrize("left", ["", '{"step": 1, "loss": 9.0}\n{"step": 1, "lo', None])
def test_metrics_of_a_resumed_run_have_each_step_once(left: str | None, tmp_path: Path) -> None:
    """Those of the checkpoint count, whatever the earlier run has left: lines, a part of a line, or no file."""
    from report import UNFINISHED_METRICS, TrainingReport

    if left is not None:
        (tmp_path / UNFINISHED_METRICS).write_text(left)
    earlier = torch.tensor([[1 / 3, 1e6, 12.5], [0.5, 7.0, 0.0]], dtype=torch.float64)
    with TrainingReport(Console(quiet=True), tmp_path, 3, MODEL, earlier) as report:
        report.step_done(3, 0.1, 10, 0.5)
        last = report.metrics(3)[2].tolist()
        with report.saving():
            pass
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    values = [[record.get(key, 0.0) for key in KEYS] for record in records]
    assert values == [*earlier.tolist(), last]
    assert ["compile_seconds" in record for record in records] == [True, False, False]
    assert last[0] == 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_compilation_is_shown_apart_and_does_not_make_the_step_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: mock.MagicMock
) -> None:
    from report import TrainingReport

    now = [0.0]
    so_far = [Compilations(3, 1.0)]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Device, "compiled", lambda _: so_far[0])
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    with TrainingReport(console, tmp_path, 100, MODEL) as report:
        now[0], so_far[0] = 14.0, Compilations(9, 13.0)
        report.step_done(1, 0.5, 100, 0.25)
        for step, now[0] in ((2, 16.0), (3, 18.0), (4, 20.0), (5, 22.0)):
            report.step_done(step, 0.5, 100, 0.25)
        assert report.metrics(2).tolist() == [[0.5, 50.0, 12.0], [0.5, 50.0, 0.0]]
    assert written.write.mock_calls[:2] == [
        mock.call(0.5, 100, compile_seconds=12.0),
        mock.call(0.5, 100, compile_seconds=None),
    ]
    assert printed.getvalue().splitlines() == [
        "step 1/100  compiling 12.0 s (6 graphs)  loss 0.500  50 tokens/s  busy 25%",
        "step 5/100  loss 0.500  50 tokens/s  busy 25%",
    ]


def _terminal_output(folder: Path) -> str:
    """Text of two steps on a terminal, before the end of the report."""
    from report import TrainingReport

    written = io.StringIO()
    with TrainingReport(Console(file=written, width=80, force_terminal=True), folder, 2, MODEL) as report:
        for step in (1, 2):
            report.step_done(step, 0.5, 100, 0.25)
        return written.getvalue()


def test_a_terminal_that_moves_no_cursor_has_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    lines = _terminal_output(tmp_path).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]


def test_the_cursor_is_there_whatever_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, and torchrun's SIGKILL, leave nothing to the process."""
    monkeypatch.setenv("TERM", "xterm")
    text = _terminal_output(tmp_path)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_metrics_of_a_checkpoint_without_compile_seconds(tmp_path: Path) -> None:
    from report import TrainingReport

    with TrainingReport(Console(quiet=True), tmp_path, 2, MODEL, torch.ones(1, 2, dtype=torch.float64)) as report:
        assert report.metrics(1).tolist() == [[1.0, 1.0, 0.0]]


def test_no_digit_is_lost_with_eight_ranks_at_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar of a long run, and the table of the stages of a large model."""
    import report

    written = io.StringIO()
    console = Console(file=written, width=80, force_terminal=True, color_system=None)
    shares = [0.611 + 0.027 * rank for rank in range(8)]
    monkeypatch.setattr(report, "numbers_of_all_ranks", lambda _: torch.tensor([[0, 1, 0, 0, 0]] * 8))
    monkeypatch.setattr(report, "_stage_means", lambda _: shares)
    with report.TrainingReport(console, tmp_path, 100_000, MODEL) as running:
        running.step_done(99_999, 12.3456, 1_234_567, 0.5)
    bar = next(line for line in reversed(written.getvalue().splitlines()) if "99999/100000" in line)
    assert bar.rstrip().endswith("loss 12.346  1,234,567 tokens/s  busy 61-80%")
    rows = [("15, 16", 0, "model.layers.120-122, 123-126", 405_853_388_800, 1_623_413_555_200)] * 8
    monkeypatch.setattr(report, "from_all_ranks", lambda _: rows)
    model: Any = SimpleNamespace(local_named_parameters=list, local_stages=[15, 16], stage_layers=[])
    report.print_stage_table(console, model)
    lines = written.getvalue().splitlines()
    assert sum("405,853,388,800" in line and "1.6 TB" in line for line in lines) == 8
    for width in (60, 40):
        report.print_stage_table(Console(file=written, width=width), model)
    assert not any("…" in line for line in written.getvalue().splitlines())


def test_layers_of_several_stages() -> None:
    from report import _spans

    assert _spans([f"model.layers.{number}" for number in (2, 3, 6)]) == "model.layers.2-3, 6"
    assert (_spans([]), _spans(["layers.0"])) == ("none", "layers.0")
