"""The text of the main job: held-out files are not trained on."""

import os
from pathlib import Path

import pytest
from corpus import decode, read_corpus, standard_library_files


def _files(folder: Path, count: int) -> list[Path]:
    files = [folder / f"{index:02}.txt" for index in range(count)]
    for index, file in enumerate(files, start=1):
        file.write_bytes(bytes([index]) * index)
    return files


def _values(text: bytes) -> set[int]:
    return set(text) - {0}


def test_the_standard_library_has_enough_text() -> None:
    files = standard_library_files()
    corpus = read_corpus(files)

    assert Path(os.__file__) in files
    assert files == sorted(files)
    assert len(corpus.train) > 2_000_000
    assert len(corpus.held_out) > 50_000


def test_whole_files_of_the_standard_library_are_held_out() -> None:
    corpus = read_corpus(standard_library_files())

    assert not set(corpus.train_files) & set(corpus.held_out_files)
    assert sorted(corpus.train_files + corpus.held_out_files) == standard_library_files()
    train = corpus.train
    for file in corpus.held_out_files:
        assert file.read_bytes() not in train


def test_corpus_is_deterministic() -> None:
    first, second = read_corpus(standard_library_files()), read_corpus(standard_library_files())

    assert first.train == second.train
    assert first.held_out == second.held_out
    assert first.train_files == second.train_files


@pytest.mark.parametrize(("count", "held_out"), [(2, {2}), (19, {19}), (20, {20}), (39, {20}), (41, {20, 40})])
def test_whole_files_are_held_out(tmp_path: Path, count: int, held_out: set[int]) -> None:
    corpus = read_corpus(_files(tmp_path, count))

    assert _values(corpus.held_out) == held_out
    assert _values(corpus.train) == set(range(1, count + 1)) - held_out


def test_every_byte_is_in_one_text(tmp_path: Path) -> None:
    files = _files(tmp_path, 25)
    corpus = read_corpus(files)
    ends_of_files = len(corpus.train_files) - 1 + len(corpus.held_out_files) - 1

    assert len(corpus.train) + len(corpus.held_out) - ends_of_files == sum(f.stat().st_size for f in files)


def test_last_twentieth_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(1, 201)))
    corpus = read_corpus([file])

    assert corpus.train == bytes(range(1, 191))
    assert corpus.held_out == bytes(range(191, 201))


def test_tiny_and_empty_files(tmp_path: Path) -> None:
    empty, tiny = tmp_path / "empty", tmp_path / "tiny"
    empty.touch()
    tiny.write_bytes(b"ab")
    corpus = read_corpus([empty, tiny])

    assert corpus.train == b"ab"
    assert len(corpus.held_out) == 0
    assert empty not in corpus.train_files


def test_unreadable_text_is_refused(tmp_path: Path) -> None:
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.touch()
    file.write_text("text")

    with pytest.raises(ValueError, match=r"cannot read .*missing: No such file"):
        read_corpus([tmp_path / "missing"])
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory"):
        read_corpus([tmp_path])
    with pytest.raises(ValueError, match=r"no text in .*empty"):
        read_corpus([empty])
    with pytest.raises(ValueError, match="file is named twice"):
        read_corpus([file, tmp_path / "." / "file"])


def test_decode_takes_any_ids() -> None:
    assert decode(list(b"caf\xc3\xa9")) == "café"
    assert decode([97, 255, 300, 98]) == "a\ufffdb"
    assert decode(list(b"\ta\n\x1b[31m\x00")) == "\ta\n\ufffd[31m\ufffd"
