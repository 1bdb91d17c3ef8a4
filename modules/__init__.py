"""Modules of several tensor-parallel layers, at the import paths of NeuronX Distributed.

Submodules are imported at their first use.
"""

from importlib import import_module
from typing import Any

__all__ = ["qkv_linear"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"nxdpp.modules.{name}")
    raise AttributeError(f"module 'nxdpp.modules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
