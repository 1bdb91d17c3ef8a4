"""Front doors import public names only: those in ``__all__`` of ``nxdpp`` and of three of its packages."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

DOORS = Path(__file__).parents[2] / "compat"
PUBLIC = ("nxdpp", "nxdpp.optimizer", "nxdpp.parallel_layers")
FILES = sorted(path.relative_to(DOORS).as_posix() for path in DOORS.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_only_public_names_are_imported(name: str) -> None:
    source = (DOORS / name).read_text()

    assert not list(_private(source, f"nxdpp.{name.split('/')[0]}"))


def test_a_private_name_is_found() -> None:
    allowed = "import torch\nfrom nxdpp import Pipeline\nfrom nxdpp.nnscaler.enums import ReuseType"
    private = "from nxdpp.pipeline.config import PipelineConfig"

    assert not list(_private(allowed, "nxdpp.nnscaler"))
    assert list(_private(f"{allowed}\n{private}", "nxdpp.nnscaler")) == ["nxdpp.pipeline.config.PipelineConfig"]
    assert list(_private("import nxdpp.pipeline", "nxdpp.nnscaler")) == ["nxdpp.pipeline"]
    assert list(_private("from nxdpp.nnscaler.enums import ReuseType", "nxdpp.oslo")) == [
        "nxdpp.nnscaler.enums.ReuseType"
    ]


def _private(source: str, door: str) -> Iterator[str]:
    """Give each import of nxdpp in ``source`` that is neither of ``door`` itself nor public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_private(alias.name, None, door))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names if _is_private(module, alias.name, door))


def _is_private(module: str, name: str | None, door: str) -> bool:
    if module.partition(".")[0] != "nxdpp" or f"{module}.".startswith(f"{door}."):
        return False
    return module not in PUBLIC or (name is not None and name not in import_module(module).__all__)
