"""Imports follow the arrows of ``arrows.toml``. Neither rooms nor modules import in a circle."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

# Methods that a room above does: they import it when they are called.
UPWARD = {
    ("nxdpp.pipeline.model", "nxdpp.generation.generate"),
    ("nxdpp.pipeline.local.own_save", "nxdpp.checkpoint.huggingface.save"),
    ("nxdpp.ranks.parallel_state", "nxdpp.tensor.move_model_to_device"),
}
ROOT = Path(__file__).parents[1]
# For each room, from the top, the rooms that it imports. ``top`` is nxdpp itself with the faces of other libraries.
ARROWS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("arrows.toml").read_text())


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return for each module of nxdpp the modules of nxdpp that it imports anywhere in its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        graph = grimp.build_graph("nxdpp", cache_dir=None)
    for importer, imported in UPWARD:
        graph.remove_import(importer=importer, imported=imported)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_every_arrow_is_listed(imports: dict[str, set[str]]) -> None:
    wrong = [
        f"{importer} imports {imported}: arrows.toml has no {target} in {source}"
        for importer, imported, source, target in _arrows(imports)
        if target not in ARROWS[source]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_listed_arrow_is_in_the_code(imports: dict[str, set[str]]) -> None:
    used = {(source, target) for _, _, source, target in _arrows(imports)}
    assert not {(source, target) for source, targets in ARROWS.items() for target in targets} - used


def test_arrows_point_down() -> None:
    rooms = list(ARROWS)
    up = [f"{source} -> {target}" for source in rooms for target in ARROWS[source] if _is_above(rooms, target, source)]
    assert not up


def test_no_circle_of_modules(imports: dict[str, set[str]]) -> None:
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle


def test_no_module_of_nxdpp_is_imported_by_a_string() -> None:
    paths = sorted((ROOT / "nxdpp").rglob("*.py"))
    assert not [f"{path}:{line}" for path in paths for line in _own_imports_by_string(path.read_text())]
    assert list(_own_imports_by_string("import_module(f'nxdpp.{name}')\nimport_module('torch')")) == [1]


def _own_imports_by_string(source: str) -> Iterator[int]:
    """Give the line of each ``import_module`` or ``__import__`` that does not name another library."""
    for node in ast.walk(ast.parse(source)) if re.search(r"import_module|__import__", source) else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            name = node.args[0]
            if not isinstance(name, ast.Constant) or str(name.value).partition(".")[0] == "nxdpp":
                yield node.lineno


def _is_above(rooms: list[str], one: str, other: str) -> bool:
    return rooms.index(one) < rooms.index(other)


def _arrows(imports: dict[str, set[str]]) -> Iterator[tuple[str, str, str, str]]:
    """Give importer, imported, and the room of each, for all imports between rooms."""
    for importer in sorted(imports):
        for imported in sorted(imports[importer]):
            if _room(importer) != _room(imported):
                yield importer, imported, _room(importer), _room(imported)


def _room(module: str) -> str:
    """Return the folder below nxdpp that ``module`` is in, or ``top`` for nxdpp itself and its faces."""
    name = [*module.split("."), ""][1]
    return name if name in ARROWS else "top"
