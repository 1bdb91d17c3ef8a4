"""The directory of checkpoints: order of tags, pruning of our files alone."""

import json
from pathlib import Path

import pytest

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.document import DOCUMENT

FOREIGN = ("notes.txt", "model.safetensors", "1f0c2a3b-rank0001.safetensors", ".1f0c-checkpoint.json", "latest.txt")


def checkpoint(path: Path, tag: str, number: int, save: str = "0123abcd") -> set[str]:
    """Make a checkpoint of two files, and return their names."""
    folder = path / tag
    folder.mkdir(parents=True, exist_ok=True)
    names = {directory.file_name(save, rank) for rank in range(2)}
    for name in names:
        (folder / name).write_bytes(b"values")
    text = json.dumps({"format": "nxdpp", "version": 1, "number": number, "checksum": ""})
    directory.new_document(folder, save).write_text(text)
    directory.put_document(folder, save)
    return names


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


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


def test_a_document_whose_head_is_damaged_comes_last(tmp_path: Path) -> None:
    checkpoint(tmp_path, "one", 1)
    checkpoint(tmp_path, "two", 2)
    (tmp_path / "two" / DOCUMENT).write_bytes(b"\0" * 100)
    assert directory.tags(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("tag", ["", ".", "..", "latest", "a/b", "/a", "a/", 3, None])
def test_tags_that_are_no_name_of_a_directory_are_refused(tag: object) -> None:
    with pytest.raises(ValueError, match="must be the name of a directory"):
        directory.check_tag(tag)  # type: ignore[arg-type]


def test_pruning_removes_older_checkpoints_and_what_unfinished_saves_have_left(tmp_path: Path) -> None:
    for number in range(1, 5):
        checkpoint(tmp_path, f"step_{number}", number)
    named = checkpoint(tmp_path, "step_4", 5, "89abcdef")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / directory.file_name("aaaaaaaa", 12)).touch()
    directory.new_document(tmp_path / "unfinished", "aaaaaaaa").touch()
    (tmp_path / ".latest.123").touch()
    directory.write_latest(tmp_path, "step_4")
    directory.prune(tmp_path, 2, "step_4", named)
    assert names_in(tmp_path) == {"latest", "step_3", "step_4"}
    assert names_in(tmp_path / "step_4") == named | {DOCUMENT}
    directory.prune(tmp_path, None, "step_4", named)
    assert names_in(tmp_path) == {"latest", "step_3", "step_4"}
    directory.prune(tmp_path, 1, "step_4", named)
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
    directory.prune(tmp_path, 1, "two", named)
    assert names_in(tmp_path) == {"one", "two", "logs", "empty", *FOREIGN}
    assert names_in(tmp_path / "one") == set(FOREIGN)
    assert names_in(tmp_path / "logs") == {"deeper", *FOREIGN}
    assert deep.exists()


def test_a_directory_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a disk has such a one: lost+found."""
    named = checkpoint(tmp_path, "one", 1)
    closed = tmp_path / "lost+found"
    closed.mkdir()
    stat, listed = Path.stat, Path.iterdir

    def refusing_stat(self: Path, *, follow_symlinks: bool = True) -> object:
        if self.parent == closed:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, follow_symlinks=follow_symlinks)

    def refusing_list(self: Path) -> object:
        if self == closed:
            raise PermissionError(13, "Permission denied", str(self))
        return listed(self)

    monkeypatch.setattr(Path, "stat", refusing_stat)
    monkeypatch.setattr(Path, "iterdir", refusing_list)
    assert directory.tags(tmp_path) == ["one"]
    directory.prune(tmp_path, 1, "one", named)


def test_names_of_files_of_a_save_are_known() -> None:
    assert directory.is_file_of_save(directory.file_name("0123abcd", 123456))
    assert directory.is_file_of_save(directory.new_document(Path("folder"), "0123abcd").name)
    assert not any(map(directory.is_file_of_save, FOREIGN))
    assert not directory.is_file_of_save(DOCUMENT)
