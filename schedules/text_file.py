"""Text of a file that a user names."""

import stat
from pathlib import Path


def text_of(path: Path) -> str:
    """Return the text of ``path``.

    Raises ``OSError`` for a file that cannot be read, and for a pipe or a device, which may never end;
    ``UnicodeDecodeError`` for one that is no text.
    """
    mode = path.stat().st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        raise OSError("it is a pipe or a device, which may never end. Write it into a file first.")
    return path.read_text(encoding="utf-8")
