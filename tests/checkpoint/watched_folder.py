"""The states that a folder has while something changes its files: those that a kill would leave."""

import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_EVENTS = ("open", "os.")
_watched: list[Callable[[], None]] = []


def _before_each_change(event: str, _: tuple[Any, ...]) -> None:
    if _watched and event.startswith(_EVENTS):
        (look,) = _watched
        _watched.clear()
        look()
        _watched.append(look)


@cache
def _watch() -> None:
    # A hook of the interpreter cannot be removed.
    sys.addaudithook(_before_each_change)


def states_of(act: Callable[[], None], folder: Path, copies: Path) -> list[Path]:
    """Copies of ``folder`` in each state that it has while ``act`` runs, the first and the last included."""
    seen: list[Any] = []

    def look() -> None:
        files = sorted(path for path in folder.rglob("*"))
        stats = [(path, path.stat()) for path in files]
        state = [(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats if path.is_file()]
        if not seen or seen[-1] != state:
            shutil.copytree(folder, copies / f"{len(seen):03d}")
            seen.append(state)

    _watch()
    _watched.append(look)
    try:
        act()
    finally:
        _watched.clear()
    look()
    return sorted(copies.iterdir())
