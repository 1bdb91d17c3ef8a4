"""Attention at the import paths of NeuronX Distributed."""

from nxdpp.kernels import flash_attn as flash_attn
from nxdpp.kernels import ring_attention_kernel as ring_attention_kernel

__all__ = ["flash_attn", "ring_attention_kernel"]


def __dir__() -> list[str]:
    return __all__
