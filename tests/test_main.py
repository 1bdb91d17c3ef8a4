"""``python -m nxdpp`` without a command."""

import pytest

from nxdpp.__main__ import main


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("plan", "schedule", "checkpoint"))
    assert "hang_timeout" in printed
