"""nnScaler's ways in: ``import nxdpp.nnscaler as nnscaler``.

The names are imported at their first use: ``ComputeConfig`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.nnscaler.compute_config import ComputeConfig
    from nxdpp.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType

__all__ = ["BroadcastGenFilesStrategy", "ComputeConfig", "ReuseType"]

_FILES = {
    "BroadcastGenFilesStrategy": "enums",
    "ComputeConfig": "compute_config",
    "ReuseType": "enums",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"nxdpp.nnscaler.{_FILES[name]}"), name)
    raise AttributeError(f"module 'nxdpp.nnscaler' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
