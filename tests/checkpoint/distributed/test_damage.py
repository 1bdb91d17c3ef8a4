"""Damaged checkpoints: the file is named, and without a tag the next older whole checkpoint is loaded."""

import errno
import json
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.collective_call import KINDS
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.load import load_first_whole
from nxdpp.checkpoint.distributed.load_targets import LoadArguments
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.doors.nxd.checkpoint import has_checkpoint
from nxdpp.ranks.exchange import Exchange
from tests.checkpoint.distributed.small_training import Training, is_same
from tests.support.run_ranks import run_ranks

T = TypeVar("T")
Damage = Callable[[Path], object]


def flip(place: float) -> Damage:
    def act(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[int(place * len(content)) if place < 1 else -1] ^= 1
        file.write_bytes(content)

    return act


DAMAGES: dict[str, Damage] = {
    "byte": flip(1),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "missing": Path.unlink,
}


def shard(folder: Path, rank: int = 0) -> Path:
    (file,) = folder.glob(f"*-rank{rank:05d}.safetensors")
    return file


@pytest.fixture
def saved(tmp_path: Path) -> list[dict[str, Any]]:
    """The state of each of three checkpoints in ``tmp_path``: the first one is before any step."""
    training = Training()
    states = []
    for step in range(3):
        training.save(tmp_path, f"step_{step}")
        states.append(training.state())
        training.step()
    return states


def test_a_damaged_checkpoint_changes_nothing(saved: list[dict[str, Any]], tmp_path: Path) -> None:
    """The oldest one was saved before a step: its optimizer has no state."""
    for step in (1, 2):
        flip(1)(shard(tmp_path / f"step_{step}"))
    training = Training()
    assert training.load(tmp_path) == {"tag": "step_0"}
    assert is_same(training.state(), saved[0])
    flip(1)(shard(tmp_path / "step_0"))
    training.step()
    before = training.state()
    with pytest.raises(DamagedFile, match="step_0") as caught:
        training.load(tmp_path)
    assert is_same(training.state(), before)
    assert not hasattr(caught.value, "__notes__")
    training.save(tmp_path, "step_3")


@pytest.mark.parametrize("damage", [flip(0.3), DAMAGES["empty"]])
def test_a_damaged_document(damage: Damage, saved: list[dict[str, Any]], tmp_path: Path) -> None:
    document = tmp_path / "step_2" / DOCUMENT
    damage(document)
    with pytest.raises(DamagedFile, match=str(document)):
        Training().load(tmp_path, "step_2")
    training = Training()
    assert training.load(tmp_path) == {"tag": "step_1"}
    assert is_same(training.state(), saved[1])


def test_a_missing_document_is_no_checkpoint(saved: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "step_2" / DOCUMENT).unlink()
    with pytest.raises(FileNotFoundError, match="step_2 has no whole checkpoint"):
        Training().load(tmp_path, "step_2")
    with pytest.raises(FileNotFoundError, match=r"other has no whole checkpoint: .* has step_0, step_1\.$"):
        Training().load(tmp_path, "other")
    assert Training().load(tmp_path) == {"tag": "step_1"}
    for tag in ("step_1", "step_0"):
        assert has_checkpoint(tmp_path)
        (tmp_path / tag / DOCUMENT).unlink()
    assert not has_checkpoint(tmp_path)


def test_a_damaged_checkpoint_is_not_counted_by_the_next_saves(saved: list[dict[str, Any]], tmp_path: Path) -> None:
    """The load has found its damage, which no size shows."""
    flip(1)(shard(tmp_path / "step_2"))
    training = Training()
    assert training.load(tmp_path) == {"tag": "step_1"}
    training.save(tmp_path, "step_3", num_kept_ckpts=2)
    assert "step_1" in directory.tags(tmp_path)


def _ranks_load(rank: int, path: Path) -> list[tuple[Any, list[str], str]]:
    parallel_state.initialize_model_parallel()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nxdpp").addHandler(handler)
    training = Training()
    for step in range(3):
        training.save(path, f"step_{step}")
        training.step()
    found = []
    for name, damage in DAMAGES.items():
        training.save(path, name)
        damaged = shard(path / name, 1)
        parallel_state.get_exchange().gather(None)
        if rank == 0:
            damage(damaged)
        parallel_state.get_exchange().gather(None)
        messages.clear()
        content = training.load(path)
        error = ""
        try:
            training.load(path, name)
        except DamagedFile as damaged_file:
            error = str(damaged_file)
        found.append((content, list(messages), error))
        training.load(path, "step_2")
        parallel_state.get_exchange().gather(None)
        if rank == 0:
            (path / name / DOCUMENT).unlink()
        parallel_state.get_exchange().gather(None)
    return found


def test_all_ranks_load_the_same_older_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(2, _ranks_load, tmp_path)
    for number, name in enumerate(DAMAGES):
        for rank in range(2):
            content, messages, error = results[rank][number]
            assert content == {"tag": "step_2"}
            assert len(messages) == (1 if rank == 0 else 0)
            assert all("the next older checkpoint is loaded" in message for message in messages)
            assert f"{tmp_path / name}" in error
            assert "rank00001.safetensors is " in error
    assert directory.tags(tmp_path) == ["step_2", "step_1", "step_0"]


def test_a_document_that_may_not_be_read_is_not_passed_over(
    saved: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right that is missing may be given: an older checkpoint would lose steps in silence."""
    read = Path.read_bytes

    def failing(self: Path) -> bytes:
        if self != tmp_path / "step_2" / DOCUMENT:
            return read(self)
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(PermissionError, match="step_2"):
        Training().load(tmp_path)


def test_another_version_is_not_passed_over(saved: list[dict[str, Any]], tmp_path: Path) -> None:
    document = tmp_path / "step_2" / DOCUMENT
    body = json.loads(document.read_bytes()) | {"version": 2}
    del body["checksum"]
    checksum = f"{zlib.crc32(json.dumps(body, separators=(',', ':')).encode()):08x}"
    document.write_text(json.dumps({**body, "checksum": checksum}))
    with pytest.raises(ValueError, match="update nxdpp"):
        Training().load(tmp_path)


def test_no_older_checkpoint_is_loaded_for_another_error_of_a_rank(saved: list[dict[str, Any]], tmp_path: Path) -> None:
    """One rank finds damage, and another may not read: the cause can go away."""

    class Mixed(Exchange):
        def together(self, act: Callable[[], T]) -> T:
            try:
                return super().together(act)
            except DamagedFile:
                self.failures.append(PermissionError)
                raise

    flip(1)(shard(tmp_path / "step_2"))
    training = Training()
    arguments = LoadArguments(training.model, {"": training.optimizer}, training.scheduler, None, True)
    folders = [tmp_path / "step_2", tmp_path / "step_1"]
    with pytest.raises(DamagedFile, match="step_2"):
        load_first_whole(folders, Mixed(), arguments)
    assert load_first_whole(folders, Exchange(kinds=KINDS), arguments) == {"tag": "step_1"}
