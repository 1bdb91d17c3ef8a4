"""Objects of nxdpp by their paths."""

import importlib
from typing import Any


def imported(path: str) -> Any:
    """Import ``nxdpp.<path>`` as ``from ... import ...`` does: an attribute, otherwise a module."""
    found: Any = importlib.import_module("nxdpp")
    name = "nxdpp"
    for part in path.split("."):
        name = f"{name}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(name)
    return found
