"""``python -m nxdpp timeline``: output and refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nxdpp.__main__ import main
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import simulate
from tests.schedules.view.timeline_files import events, heads, text


@pytest.fixture
def timeline_file(tmp_path: Path) -> Path:
    """1F1B on two ranks: step 0 is ideal, in step 1 the first backward of the second rank is 3 ms late."""
    path = tmp_path / "trace.json"
    usual = simulate(FAMILIES["1f1b"].build(2, 4), 1.0, 1.0, 1.0)
    late = events(usual, 1)
    for event in late:
        if event["cat"] != "step" and event["ts"] >= 7e6 + 2000:
            event["ts"] += 3000
    path.write_text(text(heads(2) + events(usual, 0) + late))
    return path


def test_a_step_without_a_loss(timeline_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(timeline_file), "--step", "0"]) == 0
    printed = capsys.readouterr().out
    assert f"{timeline_file} has steps 0 to 1. Times are milliseconds." in printed
    assert "step 0, train, made up, measured: makespan 15, bubble 20.0 % on average" in printed
    assert "simulated: makespan 15, bubble 20.0 % on average" in printed
    drawn = [line for line in printed.splitlines() if line.startswith("rank 1")]
    assert len(drawn) == 2
    assert drawn[0] == drawn[1] == "rank 1  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  "
    assert "lost: 15 - 15 = 0 ms, 0.0 % of the step" in printed


def test_a_step_that_lost_time(timeline_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(timeline_file)]) == 0
    printed = capsys.readouterr().out
    assert "step 1, train, made up, measured: makespan 18, bubble 33.3 % on average" in printed
    assert "simulated: makespan 15, bubble 20.0 % on average" in printed
    assert "rank 1  .  F0 .  .  .  B0--- F1" in printed
    assert "lost: 18 - 15 = 3 ms, 16.7 % of the step" in printed
    words = [line.split() for line in printed.splitlines() if line[:1].isdigit()]
    # Rank, stage, bubble and simulated, computed and simulated, waited, on sends, and the rest.
    assert words[1] == ["1", "1", "33.3", "%", "20.0", "%", "12", "12", "1", "0", "5"]
    # Stage, forward, backward and transfer.
    assert words[2] == ["0", "1", "2", "0"]


def test_a_picture_of_the_measured_and_the_simulated_step(
    timeline_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.svg"
    assert main(["timeline", str(timeline_file), "--svg", str(path)]) == 0
    picture = path.read_text()
    titles = [">step 1, train, made up<", ">measured<", ">simulated with the median times of each stage<", ">ms<"]
    assert sorted(titles, key=picture.index) == titles
    waits = [event for event in json.loads(timeline_file.read_text()) if event.get("cat") == "wait"]
    # One is in the legend.
    drawn = sum(group.count("M") for group in re.findall(r'<g class="wait">(.*?)</g>', picture, re.DOTALL))
    assert drawn == 1 + sum(event["args"]["step"] == 1 for event in waits)
    assert ">wait for another rank<" in picture
    assert "start of a send" not in picture
    assert main(["timeline", str(timeline_file), "--svg", "/nowhere/a.svg"]) == 2
    assert "--svg: /nowhere/a.svg cannot be written: No such file" in capsys.readouterr().err


def test_torch_is_not_imported(timeline_file: Path) -> None:
    program = f"import sys; from nxdpp.__main__ import main; main(['timeline', {str(timeline_file)!r}]); "
    program += "assert not {'torch', 'transformers'} & set(sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr


def test_bad_files_and_steps_are_refused(timeline_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(timeline_file), "--step", "7"]) == 2
    assert "nxdpp timeline: step 7 is not there in" in capsys.readouterr().err
    assert main(["timeline", str(timeline_file.parent / "none.json")]) == 2
    assert "none.json cannot be read as a timeline" in capsys.readouterr().err
    timeline_file.write_text(timeline_file.read_text()[:-500])
    assert main(["timeline", str(timeline_file)]) == 0
    assert "has steps 0; cut short: 1." in capsys.readouterr().out
