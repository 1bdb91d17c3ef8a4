"""The sdist and the wheel that ``python -m build`` makes of a clean clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import nxdpp

ROOT = Path(__file__).parents[1]
SECONDS = 120
DATA = {"nxdpp/py.typed", "nxdpp/watching/page.html"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tracked files, links as links."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(clone: Path) -> Path:
    """Build the sdist from the clone, and the wheel from the sdist."""
    process = build(clone)
    assert process.returncode == 0, process.stdout
    return clone / "dist"


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build", "--no-isolation"]
    return subprocess.run(
        command, cwd=folder, timeout=SECONDS, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def modules(folder: Path) -> set[str]:
    """Return every file that users import, by its path in the wheel."""
    return {str(path.relative_to(folder)) for path in (folder / "nxdpp").rglob("*.py")}


def test_the_wheel_has_every_module_and_no_link(clone: Path, built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        entries = wheel.infolist()
    names = {entry.filename for entry in entries if ".dist-info/" not in entry.filename}

    assert names == modules(clone) | DATA
    assert {"nxdpp/pipeline/partition/__init__.py", "nxdpp/nnscaler/__init__.py"} <= names
    assert not [entry.filename for entry in entries if (entry.external_attr >> 16) & 0o170000 == 0o120000]


def test_the_sdist_has_no_link(clone: Path, built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        members = sdist.getmembers()

    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members}
    assert modules(clone) | DATA | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_an_editable_install_is_the_path_of_the_clone(clone: Path, tmp_path: Path) -> None:
    folder, prefix = tmp_path / "clone", tmp_path / "prefix"
    shutil.copytree(clone, folder, symlinks=True, ignore=shutil.ignore_patterns("dist", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    pip += ["--ignore-installed", "--prefix", str(prefix)]
    subprocess.run([*pip, "-e", str(folder)], check=True, timeout=SECONDS)
    (site,) = prefix.rglob("site-packages")
    # Type checkers read a folder, and run no finder.
    (path,) = site.glob("__editable__*")
    assert path.read_text().strip() == str(folder)

    # An installed copy would be found first: the interpreter gets every other package of this environment.
    others = tmp_path / "others"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("nxdpp"):
            (others / entry.name).symlink_to(entry)
    code = "import site, sys; site.addsitedir(sys.argv[1]); import nxdpp.schedules.families.registry"
    imported = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}; print(nxdpp.__file__, nxdpp.__version__)", str(site)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(others)},
        timeout=SECONDS,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )

    assert imported.stdout.split() == [str(folder / "nxdpp/__init__.py"), nxdpp.__version__]


@pytest.fixture(scope="module")
def without_links(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the clone with links as text files, as git does with core.symlinks=false, and Python's zipfile."""
    folder = tmp_path_factory.mktemp("zip") / "nxdpp-main"
    shutil.copytree(clone, folder, symlinks=True, ignore=shutil.ignore_patterns("dist", "build", "*.egg-info"))
    links = [path for path in folder.iterdir() if path.is_symlink()]
    assert links
    for link in links:
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    return folder


def run_without_path(folder: Path, *arguments: str, path: Path | None = None) -> str:
    """Run Python in ``folder``, where nxdpp is the folder's own or below ``path``; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, timeout=SECONDS, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_checkout_without_links_runs_as_it_is(without_links: Path) -> None:
    assert run_without_path(without_links, "-m", "nxdpp", "--version") == f"nxdpp {nxdpp.__version__}\n"
