"""Name and head of a checkpoint's document, which are read without torch."""

import re
from pathlib import Path

DOCUMENT = "checkpoint.json"
_HEAD_BYTES = 200
_BEGINNING = b'{"format": "nxdpp", '
_NUMBER = re.compile(rb'\{"format": "nxdpp", "version": \d+, "number": (\d+),')


def has_our_head(directory: Path) -> bool:
    """Return whether the document in ``directory`` begins as one of nxdpp; ``False`` where it cannot be read."""
    try:
        with (directory / DOCUMENT).open("rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def number_of(directory: Path) -> int:
    """Return the number of the checkpoint in ``directory``; 0 where it cannot be read. Reads the head alone."""
    try:
        with (directory / DOCUMENT).open("rb") as file:
            found = _NUMBER.match(file.read(_HEAD_BYTES))
    except OSError:
        return 0
    return int(found[1]) if found else 0
