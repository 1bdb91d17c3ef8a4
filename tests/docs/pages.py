"""Pages of the documentation: their code blocks, links and anchors."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"

_FENCE = re.compile(r"^(```+|~~~+)\s*([\w-]*).*$")
_COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->$")
_RANKS = re.compile(r"^# ranks: (\d+)$", re.MULTILINE)
_PRINTS = re.compile(r"^prints(?: on rank (\d+))?$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")
_SOURCE = re.compile(r"\b(?:src|srcset|href)=\"([^\"]+)\"")
_NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


class Block(NamedTuple):
    """A fenced block: its language, the line of its first line of content, its text, and the comment before it."""

    language: str
    line: int
    text: str
    comment: str


def guide_pages() -> list[Path]:
    """The pages of docs/guide in order of their names."""
    return sorted(GUIDE.glob("*.md"))


def linking_pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and all pages of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of ``page`` in order."""
    found: list[Block] = []
    comment = ""
    fence = language = ""
    content: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        matched = _FENCE.match(line)
        if fence:
            if line.strip() == fence:
                text = "\n".join(content)
                found.append(Block(language, number - len(content), text, comment))
                fence = comment = ""
            else:
                content.append(line)
        elif matched:
            fence, language = matched[1], matched[2]
            content = []
        elif line.strip():
            remark = _COMMENT.match(line.strip())
            comment = remark[1] if remark else ""
    assert not fence, f"{page}: a block has no end"
    return found


def script(page: Path) -> str:
    """The code of ``page`` as one script, in which each line has its number in the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and block.comment != "fragment":
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def fragments(page: Path) -> list[Block]:
    """The blocks of ``page`` that are only compiled."""
    return [block for block in blocks(page) if block.language == "python" and block.comment == "fragment"]


def number_of_ranks(page: Path) -> int:
    """The ranks of the script of ``page``: 2, or the number in a line ``# ranks: N`` of its code."""
    named = _RANKS.search(script(page))
    return int(named[1]) if named else 2


def printed_text(page: Path) -> dict[int, str]:
    """The text that ranks print: the blocks after ``<!-- prints -->`` (rank 0) or ``<!-- prints on rank N -->``."""
    texts: dict[int, list[str]] = {}
    for block in blocks(page):
        if marked := _PRINTS.match(block.comment):
            texts.setdefault(int(marked[1] or 0), []).append(block.text)
    return {rank: "\n".join(parts) for rank, parts in texts.items()}


def commands(page: Path) -> Iterator[tuple[int, str]]:
    """Each command of the ``sh`` blocks of ``page``, with its continuation lines, and the line of its begin."""
    for block in blocks(page):
        if block.language not in ("sh", "bash", "shell"):
            continue
        begun, begin = "", 0
        for number, line in enumerate(block.text.splitlines(), block.line):
            begin = begin if begun else number
            begun += line
            if begun.endswith("\\"):
                begun = begun[:-1] + " "
            else:
                if begun.strip() and not begun.lstrip().startswith("#"):
                    yield begin, begun.strip()
                begun = ""


def prose(page: Path) -> list[tuple[int, str]]:
    """The lines of ``page`` outside of fenced blocks, without inline code, and their numbers."""
    lines = []
    fence = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        matched = _FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif matched:
            fence = matched[1]
        else:
            lines.append((number, line))
    return lines


def relative_links(page: Path) -> list[tuple[int, str]]:
    """The links of ``page`` that are no URLs, and the numbers of their lines."""
    found = []
    for number, line in prose(page):
        visible = re.sub(r"`[^`]*`", lambda code: "x" * len(code[0]), line)
        for target in [*_LINK.findall(visible), *_SOURCE.findall(visible)]:
            if not re.match(r"[a-z]+:", target):
                found.append((number, target))
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of ``page``: those that GitHub makes of its headings, and those that it names."""
    found: set[str] = set()
    for _, line in prose(page):
        found.update(_NAMED.findall(line))
        if heading := re.match(r"#{1,6}\s+(.*?)\s*#*$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = 0
            while (name := f"{slug}-{number}" if number else slug) in found:
                number += 1
            found.add(name)
    return found
