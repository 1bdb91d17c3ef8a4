"""The directory of checkpoints: order of tags, names, renames, lock."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT, METADATA
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint
from tests.checkpoint.distributed.made_checkpoints import FOREIGN, checkpoint
from tests.checkpoint.distributed.small_training import Training

_HOLDER = """
import sys
from pathlib import Path
from nxdpp.checkpoint.distributed.directory import claim
claim(Path(sys.argv[1]) / "tag")
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
    for name in (DOCUMENT, METADATA):
        assert directory.is_file_of_save(directory.new_document(Path("folder"), "0123abcd", name).name)
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
    directory.claim(tmp_path / "tag")
    directory.release()


def test_a_directory_that_is_made_anew_is_locked_again(tmp_path: Path) -> None:
    directory.claim(tmp_path / "tag")
    first = os.stat(tmp_path / directory.LOCK)
    (tmp_path / directory.LOCK).rename(tmp_path / "moved")
    directory.claim(tmp_path / "tag")
    assert not os.path.samestat(first, os.stat(tmp_path / directory.LOCK))
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


@pytest.mark.parametrize("name", [directory.file_name("01234567", 0), f".01234567-{DOCUMENT}"])
def test_files_of_a_save_are_new(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "out" / "step_1").mkdir(parents=True)
    (tmp_path / "out" / "step_1" / name).symlink_to(precious)
    monkeypatch.setattr("secrets.token_hex", lambda _: "01234567")
    with pytest.raises(OSError, match=f"rank 0 cannot write .*{name}: File exists"):
        Training().save(tmp_path / "out", "step_1")
    assert precious.read_text() == "mine"


def test_a_directory_is_locked_before_anything_is_made_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a second job waits for the lock, the first one may remove what it takes for an unfinished save."""
    claim = directory.claim

    def waiting(folder: Path) -> None:
        assert not folder.exists()
        claim(folder)

    monkeypatch.setattr(directory, "claim", waiting)
    Training().save(tmp_path, "step_1")
    directory.release()
