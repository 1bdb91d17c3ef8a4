"""NeuronX Distributed's path of functions of gradients."""

from nxdpp.parallel_layers.gradient_norm import clip_grad_norm

__all__ = ["clip_grad_norm"]
