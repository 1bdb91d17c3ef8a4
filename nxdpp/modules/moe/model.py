"""Import path of NeuronX Distributed: ``MoE``."""

from nxdpp.tensor.modules.moe import MoE

__all__ = ["MoE"]
