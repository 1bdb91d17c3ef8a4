"""``python docs/site``: the index of the public names is that of the docstrings, and the site has no broken link."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nxdpp
from tests.docs.pages import ROOT

INDEX = ROOT / "docs/api.md"


def run(arguments: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder`` without colours."""
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def test_the_index_is_that_of_the_docstrings_and_the_site_is_whole(tmp_path: Path) -> None:
    before = INDEX.read_text()
    made = run(["docs/site", "--check", "--output", str(tmp_path)])
    assert made.returncode == 0, made.stderr
    assert INDEX.read_text() == before
    page = (tmp_path / "docs/api.html").read_text()
    assert ">Parameters<" in page
    for name in _public_names():
        assert name in page
    start = (tmp_path / "README.html").read_text()
    assert 'href="docs/guide/first_pipeline.html"' in start
    assert _sidebar(start) == _guide_parts()


def _sidebar(page: str) -> list[tuple[str, list[str]]]:
    """The captions of the sidebar of ``page`` between the guide's own and the reference, and the pages below each."""
    _, *parts = page.partition("<h3>Navigation</h3>")[2].partition("</div>")[0].split('<p class="caption"')
    found = [
        (re.findall(r'caption-text">([^<]*)<', part)[0], re.findall(r'href="docs/guide/(\w+)\.html"', part))
        for part in parts
    ]
    captions = [caption for caption, _ in found]
    assert captions[0] == "guide"
    assert captions[-3:] == ["reference", "measurements", "project"]
    assert "docs/design.html" in parts[-3]
    return found[1:-3]


def _guide_parts() -> list[tuple[str, list[str]]]:
    """The tables of the guide's first page: the heading of each, and its pages in order."""
    found: list[tuple[str, list[str]]] = []
    for line in (ROOT / "docs/guide/README.md").read_text().splitlines():
        if heading := re.fullmatch(r"\| ([\w ]+) \| \|", line):
            found.append((heading[1], []))
        elif row := re.match(r"\| \[(\w+)\.md\]", line):
            found[-1][1].append(row[1])
    assert len(found) == 4
    return found


def test_the_index_is_short_and_has_each_public_name() -> None:
    text = INDEX.read_text()
    assert len(text.encode()) <= 13 * 1024
    sections = re.findall(r"^## [^\n]*: `([\w.]+)`\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    listed = [
        f"{module}.{name}"
        for module, lines in sections
        for names in re.findall(r"^- (.*?): \S", lines, re.M)
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert sorted(listed) == sorted(_public_names())


def _public_names() -> list[str]:
    top = vars(nxdpp)["__all__"]
    names = [f"nxdpp.{name}" for name in top if callable(getattr(nxdpp, name))]
    for package in ("integrations", "nnscaler", "optimizer", "oslo", "parallel_layers", "parallel_state", "trainer"):
        names += [f"nxdpp.{package}.{name}" for name in getattr(nxdpp, package).__all__ if name not in top]
    return names
