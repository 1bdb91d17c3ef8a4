"""NeuronX Distributed's path of functions of gradients."""

from nxdpp.parallel_layers.given_gradients import bucket_allreduce_gradients
from nxdpp.parallel_layers.gradient_norm import clip_grad_norm

__all__ = ["bucket_allreduce_gradients", "clip_grad_norm"]
