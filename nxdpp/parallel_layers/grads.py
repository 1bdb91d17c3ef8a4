"""Functions of gradients at NeuronX Distributed's path, and ``reduce_gradients``."""

from nxdpp.gradients.average import bucket_allreduce_gradients, reduce_gradients
from nxdpp.gradients.gradient_norm import clip_grad_norm

__all__ = ["bucket_allreduce_gradients", "clip_grad_norm", "reduce_gradients"]
