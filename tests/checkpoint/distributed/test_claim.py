"""Lock of a directory of checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nxdpp.checkpoint.distributed import directory
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint
from tests.checkpoint.distributed.small_training import Training

_HOLDER = """
import sys
from pathlib import Path
from nxdpp.checkpoint.distributed.directory import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


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
