"""Modules of several tensor-parallel layers, at the import paths of NeuronX Distributed."""

from nxdpp.modules import moe as moe
from nxdpp.modules import qkv_linear as qkv_linear

__all__ = ["moe", "qkv_linear"]


def __dir__() -> list[str]:
    return __all__
