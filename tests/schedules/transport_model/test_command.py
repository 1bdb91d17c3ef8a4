"""``python -m tests.schedules.transport_model``: verdicts and refusals."""

from pathlib import Path

import pytest

from nxdpp.schedules.lowering.transport_rules import NCCL, RULES
from tests.schedules.transport_model.__main__ import main


def test_a_schedule_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")

    assert main([str(path), "--transport", "gloo"]) == 0

    assert capsys.readouterr().out == (
        "transport gloo: no deadlock (training and evaluation; a chain and tensors that skip stages; first and later "
        "steps)\n"
    )


def test_a_deadlock_over_a_transport_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "nccl", NCCL._replace(posted_ahead=2, pair_groups=False))

    assert main(["1f1b"]) == 2

    printed = capsys.readouterr()
    assert printed.err.startswith("transport nccl, training, a chain: nccl, lazy communicators, ")
    assert "deadlock: rank " in printed.err
    assert printed.out == ""
