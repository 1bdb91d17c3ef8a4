"""Mixture of experts, at the import paths of NeuronX Distributed."""

from nxdpp.modules.moe import expert_mlps as expert_mlps
from nxdpp.modules.moe import loss_function as loss_function
from nxdpp.modules.moe import model as model
from nxdpp.modules.moe import routing as routing

__all__ = ["expert_mlps", "loss_function", "model", "routing"]


def __dir__() -> list[str]:
    return __all__
