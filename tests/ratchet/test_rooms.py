"""Lines of code of each room and of all, the share of the largest, and files of a folder stay below ``rooms.toml``.

Docstrings, comments and blank lines are free. A commit may lower a number. It raises one only with a sentence under
``[reasons]`` that says what a user gets for it.
"""

import ast
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

from tests.test_arrows import ARROWS

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("rooms.toml")
LIMITS = tomllib.loads(FILE.read_text())
FACES = "faces"
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
)


def sources() -> list[tuple[str, Path]]:
    """Return each source file with its room. Files outside of a room are faces."""
    found = []
    for path in sorted((ROOT / "nxdpp").rglob("*.py")):
        _, *folders, _ = path.relative_to(ROOT).parts
        room = folders[0] if folders else ""
        found.append((room if room in ARROWS else FACES, path))
    return found


def code_lines(path: Path) -> int:
    """Return the number of lines with code or imports."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds) and node.body]
    firsts = [owner.body[0] for owner in owners if ast.get_docstring(owner, clean=False) is not None]
    docstrings = {line for each in firsts for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _NO_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def test_no_room_has_more_lines() -> None:
    lines: Counter[str] = Counter()
    for room, path in sources():
        lines[room] += code_lines(path)
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
