"""Folder of the plans of each test."""

from pathlib import Path

import pytest

from tests.doors.nnscaler.own_folders import VARIABLE


@pytest.fixture(autouse=True)
def folder_of_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plans"))
