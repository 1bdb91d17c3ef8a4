"""``python -m nxdpp schedule``: output, files and refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nxdpp.__main__ import main
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.written import parse_schedule

SIZE = ["--ranks", "4", "--microbatches", "8"]


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a process without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "nxdpp", "schedule", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        env={key: value for key, value in os.environ.items() if key != "COLUMNS"} | environment,
    )  # fmt: skip


def test_figures_of_the_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "interleaved", "--ranks", "8", "--microbatches", "32", "--virtual", "4"]) == 0

    printed = capsys.readouterr().out
    assert "makespan 101.25, bubble 5.2 % on average" in printed
    assert re.search(r"^0 +0, 8, 16, 24 +5.2 % +9.75$", printed, re.MULTILINE)


def test_json_is_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "zb-v", *SIZE, "--forward", "2", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert parse_schedule(found["ranks"]) == FAMILIES["zb-v"].build(4, 8)
    for texts, times in zip(found["ranks"], found["times"], strict=True):
        for text, (start, end) in zip(texts, times, strict=True):
            assert end - start == (1 if "F" in text else 0.5)
    assert found["makespan"] == max(end for times in found["times"] for _, end in times)
    assert found["peaks"] == [4, 4, 4, 4]
    assert found["mean_bubble"] == pytest.approx(sum(found["bubbles"]) / 4)


def test_exchanges_of_replicas_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", *SIZE, "--zero", "2", "--exchange", "1.5"]) == 0

    printed = capsys.readouterr().out
    assert "exchange of ZeRO-2 1.5" in printed.replace("\n", "")
    assert "G0 gather" in printed


def test_comparison_of_all_families(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--ranks", "8", "--microbatches", "32"]
    assert main(["schedule", "zb-h1", "--compare", *size]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in FAMILIES)
    assert "zb-h1 *" in printed

    assert main(["schedule", "--compare", "--virtual", "4", "--json", *size]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["families"]}
    assert list(rows) == list(FAMILIES)
    assert [rows[name]["chunks"] for name in ("1f1b", "interleaved", "zb1p", "zb-v")] == [1, 4, 4, 2]
    assert rows["zb-v"]["mean_bubble"] == pytest.approx(7 / 199)


def test_a_schedule_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "[mine].csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")

    assert main(["schedule", str(path), "--transfer", "1"]) == 0
    assert "[mine].csv: 2 ranks, 2 microbatches" in capsys.readouterr().out

    assert main(["schedule", str(path), "--ranks", "2"]) == 2
    assert "leave out --ranks" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["40", "200"])
def test_lines_fit_into_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for arguments in (["interleaved", *SIZE], ["--compare", *SIZE]):
        assert main(["schedule", *arguments]) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= int(columns)
        assert "…" not in printed
        assert "\x1b" not in printed


def test_a_terminal_without_the_letters_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "größe.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")

    finished = _run(str(path), PYTHONIOENCODING="ascii")

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("gr\\xf6\\xdfe.csv: 2 ranks, 2 microbatches")
    assert finished.stdout.isascii()


def test_colours_only_on_a_terminal() -> None:
    true = _run("zb-h1", *SIZE, FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color").stdout
    assert "\x1b[38;2;16;20;24;48;2;0;163;117mI0 " in true
    plain = _run("zb-h1", *SIZE).stdout
    assert "\x1b" not in plain
    assert 68 < max(map(len, plain.splitlines())) <= 80


def test_a_reader_that_closes_the_pipe() -> None:
    """The output is longer than a pipe holds."""
    with subprocess.Popen(
        [sys.executable, "-m", "nxdpp", "schedule", "zb-v", "--ranks", "16", "--microbatches", "128"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(10)
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(60) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2f2b", *SIZE], "there is no schedule '2f2b'. Choose one of gpipe, 1f1b"),
        ([*SIZE], "name a schedule, one of gpipe"),
        (["1f1b"], "--ranks and --microbatches are missing. Give both numbers: --ranks 4 --microbatches 8"),
        (["1f1b", *SIZE, "--virtual", "2"], "1f1b has 1 stage per rank, not 2"),
        (["none.csv"], "none.csv: cannot be read"),
        (["--compare", *SIZE, "--svg", "a.svg"], "--svg draws one schedule"),
        (["1f1b", *SIZE, "--zero", "2"], "--zero 2 tells what --exchange takes the time of: add --exchange T."),
        (["1f1b", *SIZE, "--svg", "/nowhere/a.svg"], "--svg: /nowhere/a.svg cannot be written: No such file"),
    ],
)
def test_refused_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *arguments]) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("nxdpp schedule: ")
    assert message in captured.err
    assert not captured.out


@pytest.mark.parametrize("more", [["--compare"], ["1f1b", "--virtual", "100000"]])
def test_sizes_that_would_take_minutes_are_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ranks = "8" if "--virtual" in more else "100000"
    assert main(["schedule", *more, "--ranks", ranks, "--microbatches", ranks]) == 2

    assert "forwards to simulate, and the limit is 262,144" in capsys.readouterr().err
