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
    assert _code_pixels(tmp_path / "_static") >= 120 * _LETTER


_LETTER = 0.602
"""Width of a letter of DejaVu Sans Mono, Menlo and Liberation Mono over the size of the font. Others are narrower."""


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


def _code_pixels(styles: Path) -> float:
    """The width of a block of code on a wide screen, over the size of its letters."""
    theme, basic = ((styles / f"{name}.css").read_text() for name in ("alabaster", "basic"))
    assert "max-width: none" in _rule(basic, "div.body")
    page, sidebar = _pixels(theme, "div.document", "width"), _pixels(theme, "div.sphinxsidebar", "width")
    text = page - sidebar - 2 * 30  # the padding of div.body
    assert "padding: 0 30px 0 30px" in _rule(theme, "div.body")
    assert "padding: 7px 30px" in _rule(theme, "pre")
    return (text - 2 * 30) / _pixels(theme, "pre, tt, code", "font-size")


def _rule(style: str, selector: str) -> str:
    return "".join(re.findall(rf"^{re.escape(selector)} {{([^}}]*)}}", style, re.MULTILINE))


def _pixels(style: str, selector: str, name: str) -> float:
    return float(re.findall(rf"^\s*{name}: ([\d.]+)px", _rule(style, selector), re.MULTILINE)[0])


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


_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from web_site import make_site
for link in sys.argv[2:]:
    Path("README.md").write_text(f"# Title\\n\\nA [link]({link}).\\n")
    print(link, make_site(Path("."), Path("site")))
"""


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs/guide").mkdir(parents=True)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for name in (
        "CHANGELOG",
        "benchmarks/results/table",
        "docs/api",
        "docs/page",
        "docs/guide/README",
        "docs/guide/first",
    ):
        (tmp_path / f"{name}.md").write_text(f"# Heading of {name}\n")
    with (tmp_path / "docs/guide/README.md").open("a") as guide:
        guide.write("\n| steps | |\n|---|---|\n| [first.md](first.md) | a page |\n")
    links = ["docs/page.md#heading-of-docspage", "docs/no_page.md", "docs/page.md#no-heading", "#no-heading"]
    made = run(["-c", _PROGRAM, str(ROOT / "docs/site"), *links], tmp_path)
    assert made.stdout.splitlines() == [f"{link} {link == links[0]}" for link in links], made.stderr
    assert made.stderr.count("WARNING") == len(links) - 1
