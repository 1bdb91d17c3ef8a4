"""``python docs/site``: the page of the public names is that of the docstrings, and the site has no broken link."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nxdpp
from tests.docs.pages import ROOT, anchors

pytestmark = pytest.mark.one_python

PAGE = ROOT / "docs/api.md"


def run(arguments: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder`` without colours."""
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def test_the_page_is_that_of_the_docstrings_and_the_site_is_whole(tmp_path: Path) -> None:
    before = PAGE.read_text()
    made = run(["docs/site", "--check", "--output", str(tmp_path)])
    assert made.returncode == 0, made.stderr
    assert PAGE.read_text() == before
    assert "Parameters:" in (tmp_path / "docs/api.html").read_text()
    assert 'href="docs/guide/first_pipeline.html"' in (tmp_path / "README.html").read_text()


def test_each_public_name_has_a_text_and_a_link() -> None:
    names = [f"nxdpp.{name}" for name in vars(nxdpp)["__all__"] if callable(getattr(nxdpp, name))]
    for package in ("integrations", "nnscaler", "optimizer", "oslo", "parallel_layers", "parallel_state", "trainer"):
        own = getattr(nxdpp, package).__all__
        names += [f"nxdpp.{package}.{name}" for name in own if name not in vars(nxdpp)["__all__"]]
    page = PAGE.read_text()
    for name in names:
        section = re.search(rf"^### (?:\*class\* )?{re.escape(name)}(?:\(\))?\n(.*?)(?=^##|\Z)", page, re.M | re.S)
        assert section, name
        assert re.sub(r"```.*?```", "", section[1], flags=re.S).strip(), name
    links = re.findall(r"\(#([\w-]+)\)", page)
    assert len(links) >= len(names)
    assert set(links) <= anchors(PAGE)


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
    for name in ("CHANGELOG", "docs/api", "docs/page", "docs/guide/README", "docs/guide/first"):
        (tmp_path / f"{name}.md").write_text(f"# Heading of {name}\n")
    links = ["docs/page.md#heading-of-docspage", "docs/no_page.md", "docs/page.md#no-heading", "#no-heading"]
    made = run(["-c", _PROGRAM, str(ROOT / "docs/site"), *links], tmp_path)
    assert made.stdout.splitlines() == [f"{link} {link == links[0]}" for link in links], made.stderr
    assert made.stderr.count("WARNING") == len(links) - 1
