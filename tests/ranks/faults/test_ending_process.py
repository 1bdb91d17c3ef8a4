"""torchrun's last lines have the sentence of the rank that failed first."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from nxdpp.ranks.faults.ending_process import sentence_of, tell_launcher
from tests.support.run_program import run_program

PROGRAM = str(Path(__file__).with_name("mistaken_program.py"))


def shown(folder: Path, ranks: int) -> str:
    """Return what torchrun prints last."""
    failures = {rank: ProcessFailure(rank, 100 + rank, 1, str(folder / f"{rank}.json")) for rank in range(ranks)}
    text: str = ChildFailedError("train.py", failures).format_msg()
    return text


def test_torchrun_shows_the_error_that_came_first(tmp_path: Path) -> None:
    ended = run_program(PROGRAM, [str(tmp_path)], 3)
    assert ended.codes == [1, 1, 1], ended.output
    text = shown(tmp_path, 3)
    others, _, cause = text.partition("Root Cause")
    assert others.count("traceback : stops because rank 2 failed with RuntimeError\n") == 2
    assert "rank      : 2" in cause
    assert "traceback : RuntimeError: element 0 of tensors does not require grad" in cause
    assert "\n  nxdpp: run_train has run the backward of all microbatches" in cause
    assert ended.output.count("Traceback (most recent call last)") == 1


def test_a_file_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_launcher("no launcher")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    tell_launcher("the first one")
    tell_launcher("another one")
    assert "traceback : the first one\n" in shown(tmp_path, 1)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "absent" / "1.json"))
    tell_launcher("no folder")
    error = ValueError("bad")
    error.add_note("nxdpp: a remedy.")
    assert sentence_of(error) == "ValueError: bad\nnxdpp: a remedy."
