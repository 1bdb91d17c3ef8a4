"""Source lines of each room and of all, the share of the largest, and files of a folder stay below ``rooms.toml``.

A commit may lower a number. It raises one only with a sentence under ``[reasons]`` that says what a user gets for it.
"""

import tomllib
from collections import Counter
from pathlib import Path

from tests.test_arrows import ARROWS

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("rooms.toml")
LIMITS = tomllib.loads(FILE.read_text())
FACES = "faces"


def sources() -> list[tuple[str, Path]]:
    """Return each source file with its room. Files outside of a room are faces."""
    found = []
    for folder in ("nxdpp", "pipeline", "schedules", "tracing"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # Python 3.13 follows nxdpp's links, 3.11 does not.
            *folders, _ = path.resolve().relative_to(ROOT).parts
            room = (folders[1:] or [""])[0] if folders[0] == "nxdpp" else folders[0]
            if folder == folders[0]:
                found.append((room if room in ARROWS else FACES, path))
    return found


def test_no_room_has_more_lines() -> None:
    lines: Counter[str] = Counter()
    for room, path in sources():
        lines[room] += len(path.read_text().splitlines())
    allowed = LIMITS["lines"]
    over = [f"{room}: {lines[room]} lines, {allowed[room]} allowed" for room in lines if lines[room] > allowed[room]]
    assert not over, f"{'; '.join(over)}. Take out what became unnecessary, or raise it in {FILE.name} with a reason."
    assert lines.total() <= LIMITS["all_lines"], f"{lines.total()} lines in all, {LIMITS['all_lines']} allowed"
    share = max(lines.values()) / lines.total()
    assert share <= LIMITS["largest_share"], f"the largest room has {share:.3f} of all {lines.total()} lines"


def test_no_folder_has_more_files() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for _, path in sources() if path.name != "__init__.py")
    allowed = LIMITS["files_in_a_folder"]
    over = {folder: number for folder, number in files.items() if number > allowed}
    assert not over, f"more than {allowed} files in a folder: divide it by what its files are about"
