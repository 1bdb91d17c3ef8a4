"""Public names of nxdpp: listed, completed, described in a line each, and imported at their first use."""

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import nxdpp
from nxdpp import packages, public
from nxdpp.__main__ import main

ROOT = Path(__file__).parents[1]

# Packages that no user imports from.
INTERNAL = {
    "agreement",
    "checkpoint",
    "context",
    "devices",
    "doors",
    "experts",
    "gradients",
    "ground",
    "initialization",
    "planning",
    "ranks",
    "tensor",
    "generation",
    "tracing",
    "watching",
}
PACKAGES = {path.parent.name for path in (ROOT / "nxdpp").glob("*/__init__.py")} - INTERNAL
ALL = frozenset(vars(nxdpp)["__all__"])
NAMES = ALL | PACKAGES

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def imported_for_type_checkers() -> set[str]:
    """Return the names that ``nxdpp/packages.py`` and ``nxdpp/public.py`` import as themselves."""
    nodes = [node for module in (packages, public) for node in ast.walk(ast.parse(inspect.getsource(module)))]
    aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.name for alias in aliases if alias.asname == alias.name}


def described() -> dict[str, str]:
    """Return the line of each name in the module's help."""
    indented = re.findall(r"^    (\w+)  +(\S.*)$", nxdpp.__doc__ or "", re.MULTILINE)
    return dict(indented)


def test_dir_lists_the_public_names() -> None:
    assert set(dir(nxdpp)) == NAMES | {"__version__"}
    assert all(getattr(nxdpp, name) is not None for name in NAMES)


def test_type_checkers_see_the_same_names() -> None:
    assert imported_for_type_checkers() == NAMES


def test_help_has_the_first_words_of_each_name() -> None:
    for name in NAMES:
        first = (getattr(nxdpp, name).__doc__ or "").strip().partition("\n")[0].replace("`", "")
        line = described()[name]
        assert re.match(rf"{re.escape(line)}\b", first), f"{name}: {first!r} does not begin with {line!r}"


def test_help_describes_nothing_else_and_is_what_pydoc_prints() -> None:
    assert described().keys() == NAMES
    printed = pydoc.plain(pydoc.render_doc(nxdpp))
    assert all(re.search(rf"^ +{name}  +{re.escape(line)}$", printed, re.M) for name, line in described().items())


@pytest.mark.parametrize(("name", "near"), [("NxDPModel", "NxDPPModel"), ("gradScaler", "GradScaler")])
def test_a_mistyped_name_is_answered_with_a_near_one(name: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as caught:
        getattr(nxdpp, name)
    sys.__excepthook__(caught.type, caught.value, None)
    assert f"Did you mean: '{near}'?" in capsys.readouterr().err


LIGHT = """
import sys
import nxdpp
dir(nxdpp), nxdpp.__version__, nxdpp.__doc__, hasattr(nxdpp, "NxDPModel")
assert not {"torch", "numpy", "rich"} & sys.modules.keys()
nxdpp.NxDPPModel, nxdpp.parallel_state
assert "nxdpp.planning" not in sys.modules
"""


def test_names_version_and_a_mistyped_name_import_no_torch() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize(
    "name",
    [
        "integrations",
        "modules",
        "nnscaler",
        "optimizer",
        "oslo",
        "parallel_layers",
        "parallel_layers.parallel_state",
        "pipeline",
        "trainer",
        "utils",
    ],
)
def test_a_package_shows_its_own_names_alone(name: str) -> None:
    module = importlib.import_module(f"nxdpp.{name}")
    for each in dir(module):
        value = getattr(module, each)
        owner = value.__name__ if isinstance(value, ModuleType) else value.__module__
        assert not each.startswith("_")
        assert owner.startswith("nxdpp."), f"{name}.{each} is of {owner}"
    public = getattr(module, "__all__", dir(module))
    assert set(public) <= set(dir(module))
    found: dict[str, object] = {}
    exec(f"from nxdpp.{name} import *", found)
    assert set(found) - {"__builtins__"} <= set(dir(module))


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert nxdpp.__version__ == VERSION
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"nxdpp {VERSION}\n"
