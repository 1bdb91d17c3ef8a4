"""Scripts of NeuronX Distributed, at its import paths."""

from nxdpp.scripts import checkpoint_converter as checkpoint_converter

__all__ = ["checkpoint_converter"]


def __dir__() -> list[str]:
    return __all__
