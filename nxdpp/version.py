"""Version of nxdpp: ``pyproject.toml`` has it, and an installed package carries it in its metadata."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def find_version(folder: Path = Path(__file__).parents[1]) -> str:
    """Return the version of the nxdpp in ``folder``, without an error if nothing there tells it.

    A clone has a ``pyproject.toml``. Metadata of another nxdpp may be installed beside it, so the file comes first.
    """
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    except (OSError, ValueError):
        project = {}
    if project.get("name") == "nxdpp" and "version" in project:
        return str(project["version"])
    try:
        return version("nxdpp")
    except PackageNotFoundError:
        return "0+unknown"


__version__ = find_version()
