"""Awkward sentences are in no page, message, docstring or comment, and one thing has no plural."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from nxdpp.counted import counted
from tests.docs.pages import ROOT, linking_pages

SOURCES = [path for folder in ("nxdpp", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*linking_pages(), ROOT / "CHANGELOG.md"]

# Each with a sentence that has it.
AWKWARD = {
    r"\bspares\b": "it spares gigabytes",
    r"\b(?:a|the|its|each) begin(?: and| of|,|\.)": "a rank waits at the begin of a step",
    r"\ban own\b": "an own loop",
    r"\bof ours\b": "Names of ours",
    r"\b(?:no|none|GPU|TPU|device) (?:was|were|is) at hand\b": "not run: no GPU was at hand",
    r"a signal, no memory": "killed (a signal, no memory)",
    r"\ba rank on \d+ ranks\b": "6 GB a rank on 2 ranks",
    r"(?<!and )(?<!rank )(?<![-,] )(?<!\.)\b1 (?:(?!and|or|else)[a-z-]+ )?(?:batches|batch norms|devices|elements"
    r"|entries|files|heads|hosts|layers|microbatches|parameters|processes|ranks|replicas|rows|samples|stages|steps"
    r"|tensors|tokens|values)\b": "a world of 1 ranks",
    r"\b(?:stages?|chunks?|weights|activations?|tensors|processes|devices?|[KMG]i?B) a (?:rank|process|host|stage"
    r"|microbatch)\b(?! keeps)": "65 MB of weights a rank",
    r"\ba (?:line|row|dot) a (?:rank|step|test)\b": "a line a step",
}


def text_of(path: Path) -> str:
    """The text of ``path`` with one space between its words, also where a literal goes on in the next line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = re.sub(r"\"\n\s+[rf]?\"", "", text)
    return re.sub(r"[\s`]+", " ", text)


def awkward_in(text: str) -> Iterator[str]:
    """Give each awkward phrase of ``text`` with the words around it."""
    for pattern in AWKWARD:
        for found in re.finditer(pattern, text):
            yield text[max(0, found.start() - 40) : found.end() + 20]


def unchecked_plurals(source: str) -> Iterator[str]:
    """Give each ``{len(...)}`` of a text of ``source`` before a plural, which is wrong where the length is 1."""
    for node in ast.walk(ast.parse(source)):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for number, words in pairwise(parts):
            if isinstance(number, ast.FormattedValue) and isinstance(words, ast.Constant):
                value = ast.unparse(number.value)
                if value.startswith("len(") and re.match(
                    r" (?!in |of |has )(?:[a-z-]+ )?[a-z-]+[^s]s\b", str(words.value)
                ):
                    yield f"{{{value}}}{words.value!s}"


@pytest.mark.parametrize("paths", [PAGES, SOURCES], ids=["pages", "code"])
def test_no_sentence_is_awkward(paths: list[Path]) -> None:
    assert not [f"{path.relative_to(ROOT)}: {found}" for path in paths for found in awkward_in(text_of(path))]


def test_messages_count_one_thing_in_the_singular() -> None:
    own = [path for path in SOURCES if not path.is_relative_to(ROOT / "examples")]
    assert not [f"{path.relative_to(ROOT)}: {found}" for path in own for found in unchecked_plurals(path.read_text())]


def test_the_patterns_find_their_sentences() -> None:
    assert all(re.search(pattern, sentence) for pattern, sentence in AWKWARD.items())
    assert list(unchecked_plurals('f"{len(names)} tensors are here, {len(names)} in all"')) == [
        "{len(names)} tensors are here, "
    ]


def test_a_number_has_its_noun() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(4096, "microbatch") == "4,096 microbatches"
    assert [counted(number, "row is", "rows are") for number in (1, 3)] == ["1 row is", "3 rows are"]
