"""Order in which a save brings bytes and names to the disk: a host that loses its power has a whole checkpoint too."""

import os
from pathlib import Path
from typing import Any

import pytest

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from tests.checkpoint.distributed.small_training import Training

Event = tuple[str, str]


def _noted(patch: pytest.MonkeyPatch, path: Path) -> list[Event]:
    """The calls of ``fsync``, ``rename`` and ``unlink`` from now on, with names relative to ``path``."""
    events: list[Event] = []
    fsync, rename, unlink = os.fsync, Path.rename, Path.unlink

    def name_of(file: str | Path) -> str:
        return str(Path(file).relative_to(path))

    def noted_fsync(descriptor: int) -> None:
        events.append(("flush", name_of(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Any:
        events.append(("rename", name_of(target)))
        return rename(self, target)

    def noted_unlink(self: Path, missing_ok: bool = False) -> None:
        events.append(("unlink", name_of(self)))
        unlink(self, missing_ok)

    patch.setattr(os, "fsync", noted_fsync)
    patch.setattr(Path, "rename", noted_rename)
    patch.setattr(Path, "unlink", noted_unlink)
    return events


def test_each_name_follows_the_bytes_that_it_promises(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "checkpoints"
    training = Training()
    training.save(path, "one")
    (old,) = (path / "one").glob("*.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        events = _noted(patch, path)
        training.save(path, "two", num_kept_ckpts=1)
    (new,) = (path / "two").glob("*.safetensors")
    document = directory.new_document(path / "two", new.name.partition("-")[0])
    assert events == [
        ("flush", f"two/{new.name}"),
        ("flush", f"two/{document.name}"),
        # The names of both files, before the document counts.
        ("flush", "two"),
        ("rename", f"two/{DOCUMENT}"),
        ("flush", "two"),
        # What a killed save of this process number has left.
        ("unlink", f".latest.{os.getpid()}"),
        ("flush", f".latest.{os.getpid()}"),
        ("rename", "latest"),
        # ``latest`` and ``two``, before an older checkpoint is removed.
        ("flush", "."),
        ("unlink", f"one/{DOCUMENT}"),
        ("flush", "one"),
        ("unlink", f"one/{old.name}"),
    ]
