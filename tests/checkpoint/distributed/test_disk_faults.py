"""Disks that are full, slow or not shared: a sentence on all ranks, and the training goes on."""

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed import directory, save
from nxdpp.checkpoint.distributed.directory import DOCUMENT, LOCK
from nxdpp.checkpoint.files.checksummed_writer import write_checksummed
from nxdpp.checkpoint.files.pieces import FileSpan
from tests.checkpoint.distributed.small_training import Training, is_same
from tests.support.run_ranks import run_ranks


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_after_some_bytes(file: Path, *_: Any) -> Any:
    file.write_bytes(b"some")
    full()


def files_in(path: Path) -> dict[str, bytes]:
    """All files but the lock."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != LOCK]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def _full_disk(rank: int, path: Path) -> list[str]:
    """Save on a disk that is full on rank 1, then on rank 0 at each file of the end, then on one with room."""
    parallel_state.initialize_model_parallel()
    gather = parallel_state.get_exchange().gather
    training = Training()
    training.step()
    training.save(path, "step_1")
    before = training.state()
    files = files_in(path)
    gather(None)
    messages = []

    def busy(folder: Path) -> None:
        assert not folder.exists(), "nothing is made before the directory is locked"
        raise RuntimeError("process 7 saves checkpoints in it")

    with patch.object(directory, "claim", busy), pytest.raises(RuntimeError, match="process 7 saves checkpoints in it"):
        training.save(path, "step_0")
    gather(None)
    assert files_in(path) == files
    targets = [("write_checksummed", full_after_some_bytes, 1), ("write_document", full_after_some_bytes, 0)]
    for name, function, failing in targets:
        for tag in ("step_2", "step_1"):
            training.step()
            chosen = function if rank == failing else getattr(save, name)
            message = f"rank {failing} cannot write .*No space left on device"
            with patch.object(save, name, chosen), pytest.raises(OSError, match=message) as caught:
                training.save(path, tag, num_kept_ckpts=1)
            messages.append(str(caught.value))
            gather(None)
            assert files_in(path) == files
            assert {file.name for file in path.iterdir()} == {"step_1", "latest", LOCK}
            gather(None)
    loaded = Training()
    assert loaded.load(path) == {"tag": "step_1"}
    assert is_same(loaded.state(), before)
    # The checkpoint counts when ``latest`` cannot be written: its files are kept.
    training.step()
    with patch.object(directory, "write_latest", full), pytest.raises(OSError, match="rank 0 cannot write"):
        training.save(path, "step_3")
    assert loaded.load(path, "step_3") == {"tag": "step_3"}
    assert is_same(loaded.state(), training.state())
    training.save(path, "step_4", num_kept_ckpts=1)
    gather(None)
    assert directory.tags(path) == ["step_4"]
    assert loaded.load(path) == {"tag": "step_4"}
    return messages


def _not_shared(rank: int, path: Path) -> tuple[str, str, list[str]]:
    """Save to a directory that is another one on rank 1, and load from one that rank 1 lacks.

    The ranks give the same path, and have other working directories: as hosts with other disks.
    """
    parallel_state.initialize_model_parallel()
    own = path / f"host{rank}"
    own.mkdir()
    training = Training()
    before = training.state()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(own)
        with pytest.raises(RuntimeError) as caught:
            training.save(Path("out"), "step_1")
        parallel_state.get_exchange().gather(None)
        left = list(files_in(path))
        if rank == 0:
            patch.chdir(path)
        training.save(path / "shared", "step_1")
        with pytest.raises(OSError, match="does not find") as missing:
            training.load(Path("shared"))
    assert is_same(training.state(), before)
    return str(caught.value), str(missing.value), left


def _slow_disk(rank: int, path: Path) -> None:
    """Save in the background on a disk that is slow on rank 1, and wait for that in the next save."""
    parallel_state.initialize_model_parallel(hang_timeout=1)
    training = Training()

    def slow(file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileSpan]:
        # Longer than the limits of a hang and of ranks in different calls.
        time.sleep(5.0 if file.parent.name == "step_1" else 0.0)
        return write_checksummed(file, tensors)

    with patch.object(save, "write_checksummed", slow if rank == 1 else write_checksummed):
        training.save(path, "step_1", async_save=True)
        training.step()
        training.save(path, "step_3")
    assert directory.tags(path) == ["step_3", "step_1"]


def test_a_full_disk(tmp_path: Path) -> None:
    for messages in run_ranks(2, _full_disk, tmp_path):
        assert len(messages) == 4
        assert all("Earlier checkpoints are there" in message for message in messages)


def test_a_slow_disk(tmp_path: Path) -> None:
    """The next save waits for it, and no rank is taken for one that hangs."""
    run_ranks(2, _slow_disk, tmp_path)


def test_a_directory_that_hosts_do_not_share(tmp_path: Path) -> None:
    results = run_ranks(2, _not_shared, tmp_path)
    for message, missing, left in results:
        assert f"rank 1 has written {Path('out', 'step_1')}" in message
        assert f" on {socket.gethostname()}, and rank 0 on {socket.gethostname()} does not find it" in message
        assert f"rank 1 on {socket.gethostname()} does not find {Path('shared', 'step_1')}" in missing
        assert "must be on a file system that all hosts share" in message
        assert "must be on a file system that all hosts share" in missing
        assert left == []


def test_a_file_that_has_lost_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system of the network: the size is compared before the checkpoint counts."""

    def losing(file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileSpan]:
        spans = write_checksummed(file, tensors)
        os.truncate(file, file.stat().st_size - 1)
        return spans

    monkeypatch.setattr(save, "write_checksummed", losing)
    with pytest.raises(OSError, match=r"rank 0 cannot write .*: it has \d+ of \d+ bytes. Earlier"):
        Training().save(tmp_path, "step_1")
    assert list(files_in(tmp_path)) == []


def test_a_directory_that_cannot_be_flushed_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint counts by then: its files stay."""
    training = Training()
    flushed = directory.flush_directory

    def failing(folder: Path) -> None:
        if (folder / DOCUMENT).exists():
            full()
        flushed(folder)

    monkeypatch.setattr(directory, "flush_directory", failing)
    with pytest.raises(OSError, match=f"{tmp_path / 'step_1'} is saved"):
        training.save(tmp_path, "step_1")
    assert Training().load(tmp_path, "step_1") == {"tag": "step_1"}
