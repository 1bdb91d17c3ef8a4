"""OSLO's ways in: ``import nxdpp.oslo as oslo``.

``initialize`` is imported at its first use: ``import nxdpp.oslo`` needs neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.oslo.initialization import initialize

__all__ = ["initialize"]


def __getattr__(name: str) -> Any:
    if name == "initialize":
        return import_module("nxdpp.oslo.initialization").initialize
    raise AttributeError(f"module 'nxdpp.oslo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
