"""Imports follow the arrows of docs/design.md. Neither rooms nor modules import in a circle."""

import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Return for each module of nxdpp the modules of nxdpp that it imports anywhere in its file."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    graph = grimp.build_graph("nxdpp", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_every_arrow_is_in_the_design(imports: dict[str, set[str]]) -> None:
    allowed = _arrows_of_the_design()
    wrong = [
        f"{importer} imports {imported}: docs/design.md has no arrow {source} -> {target}"
        for importer, imported, source, target in _arrows(imports)
        if target not in allowed.get(source, ())
    ]
    assert not wrong, "\n".join(wrong)


def test_every_arrow_of_the_design_is_in_the_code(imports: dict[str, set[str]]) -> None:
    found = {(source, target) for _, _, source, target in _arrows(imports)}
    unused = {(source, target) for source, targets in _arrows_of_the_design().items() for target in targets} - found
    assert not unused


def test_no_circle(imports: dict[str, set[str]]) -> None:
    TopologicalSorter(_arrows_of_the_design()).prepare()  # raises CycleError with the circle
    TopologicalSorter(imports).prepare()


def _arrows(imports: dict[str, set[str]]) -> Iterator[tuple[str, str, str, str]]:
    """Give importer, imported, and the room of each, for all imports between rooms."""
    for importer in sorted(imports):
        for imported in sorted(imports[importer]):
            if _room(importer) != _room(imported):
                yield importer, imported, _room(importer), _room(imported)


def _arrows_of_the_design() -> dict[str, set[str]]:
    """Return the figure under the heading "Arrows": for each room the rooms that it may import."""
    figure = (ROOT / "docs/design.md").read_text().partition("\n### Arrows\n")[2].split("```")[1]
    arrows: dict[str, set[str]] = {}
    room = ""
    for line in figure.splitlines():
        names = [re.sub(r"^\.", "pipeline/", name) for name in line.split()]
        if names and not line[0].isspace():
            room = names.pop(0)
        arrows.setdefault(room, set()).update(names)
    return arrows


def _room(module: str) -> str:
    """Return ``pipeline/runtime`` for a room or a file of pipeline, ``nxdpp`` for the top, else the package."""
    parts = module.split(".")[1:3]
    if not parts or parts[0] == "__main__":
        return "nxdpp"
    return "/".join(parts) if parts[0] == "pipeline" else parts[0]
