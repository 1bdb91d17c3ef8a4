"""Each private name that nxdpp uses stands in a table, and the installed versions have it as nxdpp uses it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nxdpp.ground import other_names, torch_names, transformers_names
from nxdpp.ground.names import NameGoneError, PrivateAttribute, PrivateName
from tests.ground import other_probes, torch_probes, training_probes, transformers_probes  # noqa: F401  # they register the probes
from tests.ground.probe import PROBES

ROOT = Path(__file__).parents[2]
TABLES = (torch_names, transformers_names, other_names)
NAMES = [each for table in TABLES for each in vars(table).values() if isinstance(each, PrivateName)]
# Documented by their libraries: named tuples, os._exit, sys._current_frames, torch's operations on lists.
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace", "_exit", "_current_frames", "_foreach_norm"}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_the_installed_version_has_the_name_as_it_is_used(name: PrivateName) -> None:
    """A probe is a smallest program that uses the name as nxdpp does, and returns whether it does what it should."""
    assert name in PROBES, f"tests/ground has no probe for {name.path}"
    try:
        works = PROBES[name]()
    except Exception as error:
        raise AssertionError(f"{name.path} has gone or changed; with it nxdpp {name.use}") from error
    assert works, f"{name.path} has changed; with it nxdpp {name.use}"


def test_no_other_module_uses_a_private_name() -> None:
    wrong = [f"{path.relative_to(ROOT)}:{line}: {name}" for path in _sources() for name, line in _private_names(path)]
    assert not wrong, "put them into nxdpp/ground:\n" + "\n".join(wrong)


def test_no_code_of_another_library_is_replaced_or_built() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources()
        for node in _nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr == "__code__" and isinstance(node.ctx, ast.Store))
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("CodeType", "FunctionType", "compile", "exec")
        )
    ]
    assert not wrong


def test_an_attribute_that_has_gone_is_refused_by_its_use() -> None:
    gone = PrivateAttribute("torch.nn.Module._no_such_name", "counts the grains of sand")
    with pytest.raises(NameGoneError, match="with which nxdpp counts the grains of sand"):
        gone.of(object())


def test_a_name_that_has_gone_refuses_its_feature_by_its_use() -> None:
    gone = PrivateName("torch._C._no_such_name", "counts the grains of sand")
    assert not gone.exists
    with pytest.raises(NameGoneError, match=r"torch \S+ has no torch\._C\._no_such_name, with which nxdpp counts"):
        gone()
    with pytest.raises(NameGoneError):
        _ = PrivateName("torch._no_module.name", "").found


def _sources() -> list[Path]:
    paths = sorted((ROOT / "nxdpp").rglob("*.py"))
    return [path for path in paths if "ground" not in path.relative_to(ROOT).parts]


_KINDS = (
    *(ast.Attribute, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name),
    *(ast.ImportFrom, ast.Import, ast.Constant),
)


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _KINDS)]


@cache
def _own_names() -> set[str]:
    """Names that classes, functions, attributes and variables of nxdpp have."""
    found: set[str] = set()
    for path in _sources():
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
                found.add(node.attr)
    return found


# Texts that begin as a private name and are none: ends of names of weights, files, groups, metrics and functions.
ENDS = {
    *("_proj_blocks", "_proj_scales", "_proj_scale_inv", "_qkv", "_pp_rank_", "_dp_rank_", "_pp_", "_model_parallel"),
    *("_merge_sizes", "_runtime", "_per_second", "_steps_per_second", "_latency", "_internal", "_timeout", "_readers"),
    *("_parallel_world_size", "_foreach_"),
}
OVERRIDING = {each.name for each in transformers_names.OVERRIDDEN}
LISTED = {each.name for each in NAMES if isinstance(each, PrivateAttribute)}


def _private_names(path: Path) -> Iterator[tuple[str, int]]:
    for node in _nodes(path):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node):
            if node.attr in LISTED or node.attr not in _own_names() | DOCUMENTED:
                yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("nxdpp", "__future__")):
            for each in node.names:
                if any(map(_is_private, f"{node.module}.{each.name}".split("."))):
                    yield f"{node.module}.{each.name}", node.lineno
        elif isinstance(node, ast.Import):
            for each in node.names:
                if any(map(_is_private, each.name.split("."))):
                    yield each.name, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_foreign_text(node.value):
            yield repr(node.value), node.lineno


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_private(name: str) -> bool:
    is_ours = name.startswith("_nxdpp_")
    return name.startswith("_") and not is_ours and not (name.startswith("__") and name.endswith("__"))


def _is_foreign_text(text: str) -> bool:
    """Return whether ``text``, as an argument of getattr, could be a private name of another library."""
    if re.fullmatch(r"_[a-z]\w*", text):
        return text in LISTED or (_is_private(text) and text not in _own_names() | OVERRIDING | DOCUMENTED | ENDS)
    return bool(re.fullmatch(r"(torch|transformers|accelerate|peft|einops)(\.\w+)*\._\w+(\.\w+)*", text))
