"""The directory of checkpoints: order of tags, names, renames, lock."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint
from tests.checkpoint.distributed.made_checkpoints import FOREIGN, checkpoint
from tests.checkpoint.distributed.small_training import Training

_HOLDER = """
import sys
from pathlib import Path
from nxdpp.checkpoint.distributed.directory import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_missing_directory_has_no_checkpoint() -> None:
    assert directory.tags(Path("/nowhere/at/all")) == []


def test_tags_are_in_the_order_of_saves_after_that_in_latest(tmp_path: Path) -> None:
    for number, tag in enumerate(["step_9", "step_10", "step_2", "a"], 1):
        checkpoint(tmp_path, tag, number)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "file").touch()
    assert directory.tags(tmp_path) == ["a", "step_2", "step_10", "step_9"]
    assert directory.next_number(tmp_path) == 5
    directory.write_latest(tmp_path, "step_10")
    assert directory.tags(tmp_path) == ["step_10", "a", "step_2", "step_9"]


@pytest.mark.parametrize("content", [b"gone", b"", b"\n", b"../other", b"\xff\xfe"])
def test_a_latest_without_a_checkpoint_is_ignored(content: bytes, tmp_path: Path) -> None:
    checkpoint(tmp_path, "one", 1)
    checkpoint(tmp_path, "two", 2)
    (tmp_path / directory.LATEST).write_bytes(content)
    assert directory.tags(tmp_path) == ["two", "one"]


def test_a_damaged_document_is_named_before_an_older_checkpoint_is_taken(tmp_path: Path) -> None:
    checkpoint(tmp_path, "one", 1)
    checkpoint(tmp_path, "two", 2)
    (tmp_path / "two" / DOCUMENT).write_bytes(b"\0" * 100)
    assert directory.tags(tmp_path) == ["two", "one"]


def test_a_document_of_another_program_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / DOCUMENT).write_text("{}")
    assert directory.tags(tmp_path) == []


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


@pytest.mark.parametrize("is_done", [True, False])
def test_a_rename_with_an_error(is_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of files can lose its answer: the second try of the client then fails."""
    rename = Path.rename

    def failing(self: Path, target: Path) -> None:
        if is_done:
            rename(self, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    directory.write_latest(tmp_path, "one")
    monkeypatch.setattr(Path, "rename", failing)
    if is_done:
        directory.write_latest(tmp_path, "two")
        assert directory.latest(tmp_path) == "two"
    else:
        with pytest.raises(FileNotFoundError):
            directory.write_latest(tmp_path, "two")
        assert directory.latest(tmp_path) == "one"


@pytest.mark.parametrize(
    "tag",
    [
        "",
        ".",
        "..",
        "latest",
        ".latest.7",
        DOCUMENT,
        "a/b",
        "/a",
        "a/",
        "a\n",
        " a",
        "a\0",
        "\udc80",
        "é" * 128,
        3,
        None,
    ],
)
def test_tags_that_are_no_name_of_a_directory_are_refused(tag: object) -> None:
    with pytest.raises(ValueError, match="must be the name of a directory"):
        directory.check_tag(tag)  # type: ignore[arg-type]


def test_names_of_files_of_a_save_are_known() -> None:
    assert directory.is_file_of_save(directory.file_name("0123abcd", 123456))
    assert directory.is_file_of_save(directory.new_document(Path("folder"), "0123abcd").name)
    assert not any(map(directory.is_file_of_save, FOREIGN))
    assert not directory.is_file_of_save(DOCUMENT)


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


def test_a_file_system_without_locks_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", without)
    directory.claim(tmp_path)
    directory.release()


def test_a_directory_that_is_made_anew_is_locked_again(tmp_path: Path) -> None:
    directory.claim(tmp_path)
    first = os.stat(tmp_path / directory.LOCK)
    (tmp_path / directory.LOCK).rename(tmp_path / "moved")
    directory.claim(tmp_path)
    assert not os.path.samestat(first, os.stat(tmp_path / directory.LOCK))
    directory.release()
