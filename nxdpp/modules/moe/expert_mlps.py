"""Import path of NeuronX Distributed: ``ExpertMLPs``."""

from nxdpp.tensor.modules.moe import ExpertMLPs

__all__ = ["ExpertMLPs"]
