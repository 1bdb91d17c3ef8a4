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

ENDS = {"time": BEGAN + 10, "ends": True}


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
    whole_run(Path("out"), experts=[30, 10, 20, 20])
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
4 experts, 0.50 to 1.50 of the mean  █▃▆▆"""
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


def test_a_terminal_without_other_letters_than_ascii(tmp_path: Path) -> None:
    shown = _frame(whole_run(tmp_path, experts=[1, 2]), 80, "ascii")
    assert "75% ########.." in shown
    assert "mean  +#" in shown


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


def test_many_ranks_are_counted(tmp_path: Path) -> None:
    for rank in range(20):
        lines(tmp_path, rank, begin(rank, 20), ENDS)
    shown = _frame(tmp_path)
    assert "and 4 more ranks" in shown
    assert "done 2 s ago" in shown.split("rank  stages")[0]


def test_missing_ranks_are_counted_and_rows_have_their_rank(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole")
    for rank in (0, 1):
        told = (tmp_path / "whole" / "metrics" / f"rank{rank:04}.jsonl").read_text().replace('"ranks": 2', '"ranks": 8')
        place = tmp_path / "metrics" / f"rank{3 * rank:04}.jsonl"
        place.parent.mkdir(exist_ok=True)
        place.write_text(told)
    shown = _frame(tmp_path, 120)
    assert "2 of 8 ranks, 1f1b" in shown.replace("\n", " ")
    assert [line[:6] for line in shown.splitlines() if "...." in line] == ["   0  ", "   3  "]


def test_a_terminal_obeys_nothing_of_the_files(tmp_path: Path) -> None:
    told = [step(0, 21, **{"no\x1b[2Jrm": 1.0}), {"time": BEGAN + 11, "fault": "said \x1b]0;title\x07 \u202e"}]
    lines(whole_run(tmp_path), 0, *told)
    shown = _frame(tmp_path)
    assert "\\x1b]0;title\\x07" in shown
    assert all(each.isprintable() for line in shown.splitlines() for each in line)


def test_a_run_that_was_left_by_an_error(tmp_path: Path) -> None:
    lines(whole_run(tmp_path), 0, {"time": BEGAN + 11, "ends": "Interrupted: after step 20"})
    shown = _frame(tmp_path, 200)
    assert "left 1 s ago by Interrupted: after step 20" in shown
    assert "left, 1 s ago" in shown


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    lines(tmp_path, 0, begin(0, 1, done=7))
    assert "step 7 of 40  1 rank  last line 12 s ago" in _frame(tmp_path).replace("\n", " ")
