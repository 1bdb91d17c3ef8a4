"""Links between the documents lead to files and headings that exist, and the guide's index has each page."""

from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, ROOT, anchors, guide_pages, linking_pages, relative_links


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in linking_pages()])
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for line, target in relative_links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(f"{page.relative_to(ROOT)}:{line}: {target}")
    assert not dead


def test_the_index_of_the_guide_has_each_page_once() -> None:
    index = GUIDE / "README.md"
    linked = [target for _, target in relative_links(index) if "/" not in target and "#" not in target]
    assert sorted(linked) == [page.name for page in guide_pages() if page != index]
