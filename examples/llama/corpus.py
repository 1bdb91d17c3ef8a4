"""The text to train on: bytes of files, some of which are held out for measuring.

A token is a byte, so the vocabulary is 256 ids and no tokenizer is needed. Files are joined with a zero
byte, which marks the end of a file and does not occur in text. Nothing here is collective: every rank
reads the same files and draws the same batches.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

VOCABULARY_SIZE = 256
END_OF_FILE = 0
HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Corpus:
    """Two texts without a byte in common, each a uint8 tensor of shape ``[bytes]``.

    The two tuples name the files each text came from. They are disjoint, but for a corpus of one file,
    whose last twentieth is held out.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]


def standard_library_files() -> list[Path]:
    """The running interpreter's own top-level modules (``abc.py`` to ``zipimport.py``), sorted by name.

    Packages in subfolders are left out: which of them are installed differs from machine to machine.
    """
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def read_corpus(files: Sequence[Path]) -> Corpus:
    """Read ``files`` and hold some of the text out, always the same part of it.

    Of twenty files or more, every twentieth is held out. Of two to nineteen, the last one is. Of a single
    file, its last twentieth is. Empty files count for nothing.

    Raises:
        ValueError: a file cannot be read or is named twice, or there is no text at all.
    """
    for first, second in pairwise(sorted(file.resolve() for file in files)):
        if first == second:
            raise ValueError(f"{first} is named twice, so its text could be trained on and held out: name it once")
    texts = [(file, text) for file in files if (text := _read(file))]
    if not texts:
        raise ValueError(f"no text in {', '.join(map(str, files)) or 'an empty list of files'}")
    if len(texts) == 1:
        file, text = texts[0]
        middle = len(text) - len(text) // HELD_OUT_EVERY
        return Corpus(_join([text[:middle]]), _join([text[middle:]]), (file,), (file,))
    every = min(HELD_OUT_EVERY, len(texts))
    held_out = texts[every - 1 :: every]
    train = [pair for index, pair in enumerate(texts, start=1) if index % every]
    return Corpus(
        _join([text for _, text in train]),
        _join([text for _, text in held_out]),
        tuple(file for file, _ in train),
        tuple(file for file, _ in held_out),
    )


def training_batches(text: torch.Tensor, batch_size: int, seq_length: int, seed: int) -> Iterator[torch.Tensor]:
    """Draw without end int64 batches ``[batch_size, seq_length]`` from random places of ``text``.

    The same seed gives the same batches, whatever the number of processes.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - seq_length + 1, (batch_size,), generator=generator)
        yield _windows(text, starts, seq_length)


def held_out_batches(text: torch.Tensor, batch_size: int, seq_length: int, count: int) -> Iterator[torch.Tensor]:
    """Give ``count`` int64 batches ``[batch_size, seq_length]`` from evenly spaced places of ``text``.

    They overlap where the text is shorter than all of them together.
    """
    starts = torch.linspace(0, len(text) - seq_length, count * batch_size, dtype=torch.float64).long()
    for batch_starts in starts.split(batch_size):
        yield _windows(text, batch_starts, seq_length)


def decode(tokens: Sequence[int]) -> str:
    """The text of byte ids, fit for a terminal.

    Ids above 255 are left out; what is no UTF-8, and control characters, show as U+FFFD.
    """
    text = bytes(token for token in tokens if token < VOCABULARY_SIZE).decode(errors="replace")
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error


def _join(texts: list[bytes]) -> torch.Tensor:
    joined = bytes([END_OF_FILE]).join(texts)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, seq_length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(seq_length)].long()
