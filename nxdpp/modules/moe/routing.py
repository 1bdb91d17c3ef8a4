"""Import path of NeuronX Distributed: ``RouterTopK``."""

from nxdpp.tensor.modules.moe import RouterTopK

__all__ = ["RouterTopK"]
