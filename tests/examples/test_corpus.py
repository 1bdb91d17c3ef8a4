"""The text of the main job: held-out files are not trained on, and a seed determines the batches."""

import os
from pathlib import Path

import pytest
import torch
from corpus import (
    RandomWindows,
    decode,
    held_out_batches,
    read_corpus,
    standard_library_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def _files(folder: Path, count: int) -> list[Path]:
    files = [folder / f"{index:02}.txt" for index in range(count)]
    for index, file in enumerate(files, start=1):
        file.write_bytes(bytes([index]) * index)
    return files


def _values(text: torch.Tensor) -> set[int]:
    return set(text.tolist()) - {0}


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
    train = bytes(corpus.train.tolist())
    for file in corpus.held_out_files:
        assert file.read_bytes() not in train


def test_corpus_is_deterministic() -> None:
    first, second = read_corpus(standard_library_files()), read_corpus(standard_library_files())

    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
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

    assert corpus.train.tolist() == list(range(1, 191))
    assert corpus.held_out.tolist() == list(range(191, 201))


def test_tiny_and_empty_files(tmp_path: Path) -> None:
    empty, tiny = tmp_path / "empty", tmp_path / "tiny"
    empty.touch()
    tiny.write_bytes(b"ab")
    corpus = read_corpus([empty, tiny])

    assert corpus.train.tolist() == [97, 98]
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


def test_random_windows_follow_the_seed() -> None:
    text = torch.arange(251, dtype=torch.uint8).repeat(4)

    def drawn(seed: int) -> torch.Tensor:
        windows = RandomWindows(text, 12, 16, seed)
        return torch.stack([windows[index] for index in range(len(windows))])

    assert drawn(seed=1).shape == (12, 16)
    assert drawn(seed=1).dtype == torch.int64
    assert torch.equal(drawn(seed=1), drawn(seed=1))
    assert not torch.equal(drawn(seed=1), drawn(seed=2))
    assert len({int(start) for start in drawn(seed=1)[:, 0]}) > 6


@settings(deadline=None)
@given(length=st.integers(2, 60), seq_length=st.integers(2, 60), count=st.integers(1, 4))
def test_batches_are_pieces_of_the_text(length: int, seq_length: int, count: int) -> None:
    seq_length = min(length, seq_length)
    text = torch.arange(length, dtype=torch.uint8)

    windows = RandomWindows(text, 3 * count, seq_length, seed=0)
    batches = [torch.stack([windows[index] for index in range(3)])]
    held_out = list(held_out_batches(text, 3, seq_length, count))

    assert len(held_out) == count
    for batch in batches + held_out:
        assert batch.shape == (3, seq_length)
        assert torch.equal(batch - batch[:, :1], torch.arange(seq_length).expand(3, -1))
        assert batch.max() < length


def test_held_out_batches_reach_from_the_first_byte_to_the_last() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batches = torch.cat(list(held_out_batches(text, 2, 10, 5)))

    assert batches[0, 0] == 0
    assert batches[-1, -1] == 199
    assert len(set(batches[:, 0].tolist())) == 10


def test_decode_takes_any_ids() -> None:
    assert decode(list(b"caf\xc3\xa9")) == "café"
    assert decode([97, 255, 300, 98]) == "a\ufffdb"
    assert decode(list(b"\ta\n\x1b[31m\x00")) == "\ta\n\ufffd[31m\ufffd"
