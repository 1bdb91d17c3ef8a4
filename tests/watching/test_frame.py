"""The frame of a run in a terminal."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nxdpp.watching.frame import frame
from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.summary import summary_of
from tests.watching.runs import BEGAN, begin, lines, step, whole_run

MOST_CALLS = 30_000
"""Of Python functions in a frame of two ranks; one for each of 100,000 stages would be more."""


def _frame(folder: Path, width: int = 80, encoding: str = "utf-8") -> str:
    return _frame_of(RunMetrics(folder), width, encoding)


def _frame_of(run: RunMetrics, width: int = 80, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, highlight=False, markup=False)
    console.print(frame(summary_of(run, BEGAN + 12), console))
    file.flush()
    written: Any = file.buffer
    return "\n".join(line.rstrip() for line in written.getvalue().decode(encoding).splitlines())


def test_a_frame_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    routing = {"largest_over_mean": 1.5, "largest": "layers.3.experts, expert 0", "share": 0.475}
    whole_run(Path("out"), experts=[30, 10, 20, 20], routing=routing)
    shown = _frame(Path("out"))
    assert shown == (
        """\
out  step 20 of 40  2 ranks, 1f1b  last line 2 s ago
loss              0.2 █▄▃▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁
tokens a second 1,024 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁
seconds           0.5 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁
rank  stages             busy    memory  step  seconds  last line
-----------------------------------------------------------------
0          0   75% ████████░░  500.0 MB    20    0.500    2 s ago
1          1   50% █████░░░░░  500.0 MB    20    0.500    2 s ago
step 20, 400.0 ms  F forward  B backward  . bubble
   0  FFFFFFFFFFFFFFFFFFF....................................BBBBBBBBBBBBBBBBBBB
   1  ..................FFFFFFFFFFFFFFFFFFFBBBBBBBBBBBBBBBBBBB..................
4 experts, 0.50 to 1.50 of the mean  █▃▆▆
layers.3.experts, expert 0 has 1.50 of the mean; tokens: rank 0 48%"""
    )
    assert "stages" in _frame(Path("out"), 40)


def test_a_frame_of_100_000_stages_is_not_longer_and_calls_no_function_for_each(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("few", "many")]
    for folder, count in zip(folders, (1_000, 100_000), strict=True):
        folder.mkdir()
        for rank in range(2):
            about = begin(rank) | {"stages": list(range(rank, count, 2))}
            lines(folder, rank, about, step(rank, 1, actions=[[f"{rank}F0", 1.0, 2.0]]))
    events: list[str] = []

    def note(of: object, event: str, argument: object) -> None:
        events.append(event)

    shown, calls = [], []
    for folder in folders:
        run = RunMetrics(folder)  # it reads each number once, and a frame follows every second
        sys.setprofile(note)
        try:
            shown.append(_frame_of(run))
        finally:
            sys.setprofile(None)
        calls.append(events.count("call"))
        events.clear()
    assert "99999" in shown[1]
    assert len(shown[1]) < 2 * len(shown[0]) < 4_000
    assert calls[1] < MOST_CALLS
    assert abs(calls[1] - calls[0]) < 0.2 * calls[0]


def test_faults_are_whole_sentences(tmp_path: Path) -> None:
    died = "rank 1 died without an error: killed by a signal or out of memory"
    reason = f"stops because {died}, crashed, or ended by os._exit"
    lines(whole_run(tmp_path), 0, {"time": BEGAN + 11, "fault": reason})
    shown = _frame(tmp_path)
    assert "ended by a fault 1 s ago" in shown.replace("\n", " ")
    assert "died, 2 s ago" in shown
    assert f"fault: {died}" in shown
    # A terminal shows the first lines: the fault is before the curves and ranks.
    assert shown.index("fault: rank 1") < shown.index("loss") < shown.index("rank  stages")
    assert "(told by rank 0)" in shown


def test_a_terminal_obeys_nothing_of_the_files(tmp_path: Path) -> None:
    told = [step(0, 21, **{"no\x1b[2Jrm": 1.0}), {"time": BEGAN + 11, "fault": "said \x1b]0;title\x07 \u202e"}]
    lines(whole_run(tmp_path), 0, *told)
    shown = _frame(tmp_path)
    assert "\\x1b]0;title\\x07" in shown
    assert all(each.isprintable() for line in shown.splitlines() for each in line)
