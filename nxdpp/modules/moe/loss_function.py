"""Import path of NeuronX Distributed: ``load_balancing_loss_func``."""

from nxdpp.tensor.modules.moe import load_balancing_loss_func

__all__ = ["load_balancing_loss_func"]
