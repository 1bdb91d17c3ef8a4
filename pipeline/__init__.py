"""Pipeline runtime: tracing results are cut into stages, and a schedule runs them.

``NxDPPModel`` is importable from here too, as in NeuronX Distributed; it is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.pipeline.model import NxDPPModel

__all__ = ["NxDPPModel"]


def __getattr__(name: str) -> Any:
    if name == "NxDPPModel":
        return import_module("nxdpp.pipeline.model").NxDPPModel
    raise AttributeError(f"module 'nxdpp.pipeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
