"""Training text and held-out text: the bytes of files.

A token is a byte, so the vocabulary has 256 ids and no tokenizer is needed. A zero byte between two files marks the end
of a file. Nothing here is collective: every rank reads the same files. Nothing here needs torch.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

VOCABULARY_SIZE = 256
END_OF_FILE = 0
HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Corpus:
    """Two texts that do not overlap, and the files that they come from."""

    train: bytes
    held_out: bytes
    train_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]


def standard_library_files() -> list[Path]:
    """Top-level modules of the running interpreter (``abc.py`` to ``zipimport.py``), sorted by name.

    Packages in subfolders are left out, because the installed ones differ between machines.
    """
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def read_corpus(files: Sequence[Path]) -> Corpus:
    """Read ``files`` and hold out a fixed part of the text.

    Every twentieth file is held out. Of 2 to 19 files it is the last one, and of a single file its last twentieth.
    Empty files are ignored. Raises ``ValueError`` if a file cannot be read or is named twice, or if the text is empty.
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


def decode(tokens: Sequence[int]) -> str:
    """Text of byte ids for a terminal, without ids above 255.

    Control characters and bytes that are not UTF-8 become U+FFFD.
    """
    text = bytes(token for token in tokens if token < VOCABULARY_SIZE).decode(errors="replace")
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error


def _join(texts: list[bytes]) -> bytes:
    return bytes([END_OF_FILE]).join(texts)
