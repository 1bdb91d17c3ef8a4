"""Modules of several tensor-parallel layers, at the import paths of NeuronX Distributed.

Submodules are imported at their first use.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "qkv_linear":
        return import_module("nxdpp.modules.qkv_linear")
    raise AttributeError(f"module 'nxdpp.modules' has no attribute {name!r}")
