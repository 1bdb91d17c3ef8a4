"""Pipeline runtime: tracing results are cut into stages, and a schedule runs them.

``NxDPPModel`` is importable from here too, as in NeuronX Distributed; it is imported at its first use.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["NxDPPModel"]

if TYPE_CHECKING:
    from nxdpp.pipeline.model import NxDPPModel
else:

    def __getattr__(name: str) -> Any:
        if name == "NxDPPModel":
            from nxdpp.pipeline.model import NxDPPModel

            return NxDPPModel
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
