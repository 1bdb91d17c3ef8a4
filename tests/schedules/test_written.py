"""Schedules from lists and CSV files."""

import os
from pathlib import Path

import pytest

from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.written import parse_schedule, read_schedule

RANKS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def test_lists_of_texts() -> None:
    assert parse_schedule(RANKS) == FAMILIES["1f1b"].build(2, 2)


def test_a_csv_file_with_empty_cells(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0, 0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n\n")

    assert read_schedule(tmp_path / "mine.csv") == FAMILIES["1f1b"].build(2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", "mine.csv: rank 0, action 1: '0X0' is no action"),
        ("", "mine.csv: the schedule is empty"),
        ("0F0,0B0\n1B0,1F0", r"mine.csv: rank 1, action 0 \(1B0\): a backward comes after its forward"),
    ],
)
def test_files_without_a_schedule(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)

    with pytest.raises(ValueError, match=message):
        read_schedule(tmp_path / "mine.csv")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    # To open a pipe without a writer would block.
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path / "none.csv", tmp_path, tmp_path / "binary.csv", tmp_path / "pipe.csv"):
        with pytest.raises(ValueError, match="cannot be read as a CSV file"):
            read_schedule(path)


def test_a_lacking_action_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 0 lacks 0B1"):
        parse_schedule([["0F0", "0F1", "0B0"]])
