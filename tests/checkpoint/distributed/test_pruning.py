"""Pruning: of our files alone, and never of the newest checkpoints that look whole."""

import os
from collections.abc import Callable
from pathlib import Path

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.pruning import keep_damaged, looks_whole, prune
from tests.checkpoint.distributed.made_checkpoints import FOREIGN, checkpoint


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def shard(folder: Path) -> Path:
    return folder / directory.file_name("0123abcd", 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated shard": lambda folder: os.truncate(shard(folder), 7),
    "missing shard": lambda folder: shard(folder).unlink(),
    "flipped shard that a load has found": keep_damaged,
    "damaged body": lambda folder: os.truncate(folder / DOCUMENT, 150),
    "empty document": lambda folder: os.truncate(folder / DOCUMENT, 0),
}


def test_damaged_checkpoints_are_not_counted(tmp_path: Path) -> None:
    """With two checkpoints to keep, the last whole one before two damaged ones stays."""
    for damage in DAMAGES.values():
        path = tmp_path / str(id(damage))
        for number in range(1, 6):
            named = checkpoint(path, f"step_{number}", number)
        for number in (3, 4):
            damage(path / f"step_{number}")
            assert not looks_whole(path / f"step_{number}")
        prune(path, 2, "step_5", named)
        assert {"step_5", "step_2"} <= names_in(path)
        assert "step_1" not in names_in(path)
        # One that replaces a damaged one counts.
        checkpoint(path, "step_4", 6)
        assert looks_whole(path / "step_4")
        named = checkpoint(path, "step_7", 7)
        prune(path, 2, "step_7", named)
        assert names_in(path) == {"step_7", "step_4"}


def test_links_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    checkpoint(tmp_path, "elsewhere", 1)
    named = checkpoint(path, "two", 2)
    (path / "one").symlink_to(tmp_path / "elsewhere")
    (path / "zero").symlink_to(tmp_path / "unfinished")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / directory.file_name("0123abcd", 0)).touch()
    assert prune(path, 1, "two", named) == []
    assert names_in(path) == {"one", "two", "zero"}
    assert looks_whole(path / "one")
    assert len(names_in(tmp_path / "unfinished")) == 1


def test_pruning_removes_older_checkpoints_and_what_unfinished_saves_have_left(tmp_path: Path) -> None:
    for number in range(1, 5):
        checkpoint(tmp_path, f"step_{number}", number)
    named = checkpoint(tmp_path, "step_4", 5, "89abcdef")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / directory.file_name("aaaaaaaa", 12)).touch()
    directory.new_document(tmp_path / "unfinished", "aaaaaaaa").touch()
    (tmp_path / ".latest.123").touch()
    directory.write_latest(tmp_path, "step_4")
    prune(tmp_path, 2, "step_4", named)
    assert names_in(tmp_path) == {"latest", "step_3", "step_4"}
    assert names_in(tmp_path / "step_4") == named | {DOCUMENT}
    prune(tmp_path, None, "step_4", named)
    assert names_in(tmp_path) == {"latest", "step_3", "step_4"}
    prune(tmp_path, 1, "step_4", named)
    assert names_in(tmp_path) == {"latest", "step_4"}


def test_pruning_leaves_files_and_directories_of_others(tmp_path: Path) -> None:
    checkpoint(tmp_path, "one", 1)
    named = checkpoint(tmp_path, "two", 2)
    for folder in ("one", "two", "logs", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in FOREIGN:
            (tmp_path / folder / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "logs" / "deeper").mkdir()
    deep = tmp_path / "logs" / "deeper" / directory.file_name("0123abcd", 0)
    deep.touch()
    prune(tmp_path, 1, "two", named)
    assert names_in(tmp_path) == {"one", "two", "logs", "empty", *FOREIGN}
    assert names_in(tmp_path / "one") == set(FOREIGN)
    assert names_in(tmp_path / "logs") == {"deeper", *FOREIGN}
    assert deep.exists()
