"""Functions of gradients at NeuronX Distributed's path, and ``reduce_gradients``."""

from nxdpp.parallel_layers.given_gradients import bucket_allreduce_gradients
from nxdpp.parallel_layers.gradient_norm import clip_grad_norm
from nxdpp.parallel_layers.reduced_gradients import reduce_gradients

__all__ = ["bucket_allreduce_gradients", "clip_grad_norm", "reduce_gradients"]
