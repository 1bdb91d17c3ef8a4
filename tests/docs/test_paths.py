"""Files, folders and modules that the documents name are in the tree, and the documents are small."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, linking_pages, prose

# `pipeline/engine.py`, `nxdpp/ranks/` or `tools/zoo/results/xla.tsv`, below a folder of the tree.
_PATH = re.compile(r"`((?:[\w.]+/)+[\w.]*)`")
_MODULE = re.compile(r"python -m ((?:benchmarks|tests)[\w.]*)")
_TOP = {path.name for path in ROOT.iterdir() if path.is_dir()}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in linking_pages()])
def test_named_files_exist(page: Path) -> None:
    missing = []
    for number, line in prose(page):
        if "commit" in line:  # files of an earlier tree
            continue
        paths = [path for path in _PATH.findall(line) if path.partition("/")[0] in _TOP and "NAME" not in path]
        paths += [module.replace(".", "/") for module in _MODULE.findall(line)]
        missing += [f"{page.name}:{number}: {path}" for path in paths if not _exists(path)]
    assert not missing


def _exists(path: str) -> bool:
    file = ROOT / path
    return file.exists() or file.with_suffix(".py").exists() or path.startswith("build/")


def test_the_changelog_has_the_present_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first, *released = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", each) for each in released)
    assert first == "Unreleased" or first.startswith(version)
    assert version in text.partition(released[0] if released else "\0")[0]


def test_the_documents_are_small() -> None:
    most = {"docs": 300, "docs/design.md": 25, "docs/api.md": 13, "docs/zoo.md": 8, "CHANGELOG.md": 4}
    for name, kibibytes in most.items():
        files = [file for file in [ROOT / name, *(ROOT / name).rglob("*")] if file.is_file() and file.suffix != ".pyc"]
        size = sum(file.stat().st_size for file in files)
        assert size <= kibibytes * 1024, f"{name} has {size / 1024:.0f} KiB, at most {kibibytes} are allowed"
