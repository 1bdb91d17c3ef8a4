"""Pipeline runtime: tracing results are cut into stages, and a schedule runs them.

``NxDPPModel`` is importable from here too, as in NeuronX Distributed; it is imported at its first use.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.pipeline.model import NxDPPModel

__all__ = ["NxDPPModel"]


def _module_with(name: str) -> ModuleType:
    from nxdpp.pipeline import model

    return model


__getattr__, __dir__ = late_names(__name__, __all__, _module_with)
