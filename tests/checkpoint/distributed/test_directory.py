"""The directory of checkpoints: order of tags, names, links, lock."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint
from tests.checkpoint.distributed.made_checkpoints import checkpoint
from tests.checkpoint.distributed.small_training import Training

_HOLDER = """
import sys
from pathlib import Path
from nxdpp.checkpoint.distributed.directory import claim
claim(Path(sys.argv[1]) / "tag")
print("held", flush=True)
sys.stdin.read()
"""


def test_tags_are_in_the_order_of_saves_after_that_in_latest(tmp_path: Path) -> None:
    for number, tag in enumerate(["step_9", "step_10", "step_2", "a"], 1):
        checkpoint(tmp_path, tag, number)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "file").touch()
    assert directory.tags(tmp_path) == ["a", "step_2", "step_10", "step_9"]
    assert directory.next_number(tmp_path) == 5
    directory.write_latest(tmp_path, "step_10")
    assert directory.tags(tmp_path) == ["step_10", "a", "step_2", "step_9"]


def test_a_latest_that_is_not_the_last_save_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A truncated ``latest`` can name another checkpoint: step_1 for step_10."""
    for number, tag in enumerate(["step_1", "step_9", "step_10"], 1):
        checkpoint(tmp_path, tag, number)
    directory.write_latest(tmp_path, "step_10")
    assert directory.tags_to_load(tmp_path) == ["step_10", "step_9", "step_1"]
    assert not caplog.records
    os.truncate(tmp_path / directory.LATEST, len("step_1"))
    assert directory.tags_to_load(tmp_path) == ["step_1", "step_10", "step_9"]
    (record,) = caplog.records
    assert "latest names step_1, and step_10 was saved later: give tag='step_10'" in record.getMessage()


def test_tags_that_are_no_name_of_a_directory_are_refused() -> None:
    tags: list[Any] = ["", "..", "latest", DOCUMENT, "a/b", "/a", "a\n", " a", "a\0", "\udc80", "é" * 128, 3, None]
    for tag in tags:
        with pytest.raises(ValueError, match="must be the name of a directory"):
            directory.check_tag(tag)


def test_two_programs_cannot_save_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.release()
    monkeypatch.setattr(directory, "_CLAIM_SECONDS", 0.2)
    training = Training()
    training.save(tmp_path, "before")
    finalize_checkpoint()
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        message = rf"process {holder.pid} on .* saves checkpoints in {tmp_path} at the same time: give each training"
        with pytest.raises(RuntimeError, match=message):
            training.save(tmp_path, "now", num_kept_ckpts=1)
        assert not (tmp_path / "now").exists()
        assert training.load(tmp_path) == {"tag": "before"}
        holder.kill()
    training.save(tmp_path, "after", num_kept_ckpts=1)
    assert training.load(tmp_path) == {"tag": "after"}
    directory.release()


def test_a_save_writes_through_no_link_and_no_pipe(tmp_path: Path) -> None:
    """In the place of the lock or of the checkpoint each is named; a leftover of ``latest`` is replaced."""
    directory.release()
    path, precious = tmp_path / "out", tmp_path / "precious"
    path.mkdir()
    precious.write_text("mine")
    lock, new = path / directory.LOCK, path / f".{directory.LATEST}.{os.getpid()}"
    training = Training()
    kinds: list[Callable[[Path], object]] = [
        lambda file: file.symlink_to(precious),
        os.mkfifo,
        lambda file: file.symlink_to("/dev/null"),
    ]
    for make in kinds:
        make(lock)
        with pytest.raises(OSError, match=rf"rank 0 cannot write {lock}: it must be a file of its own, and no link"):
            training.save(path, "step_1")
        assert list(path.iterdir()) == [lock]
        lock.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (path / "step_1").symlink_to(elsewhere)
    with pytest.raises(OSError, match=rf"rank 0 cannot write {path / 'step_1'}: it must be a directory of its own"):
        training.save(path, "step_1")
    assert not list(elsewhere.iterdir())
    (path / "step_1").unlink()
    for leave in kinds:
        leave(new)
        training.save(path, "step_1")
        assert directory.latest(path) == "step_1"
    assert precious.read_text() == "mine"
    directory.release()
