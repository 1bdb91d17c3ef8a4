"""Functions of gradients at NeuronX Distributed's path, and ``reduce_gradients``."""

from nxdpp.gradients.average import bucket_allreduce_gradients, reduce_gradients
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.tensor.sequence_parallel import allreduce_sequence_parallel_gradients

__all__ = ["allreduce_sequence_parallel_gradients", "bucket_allreduce_gradients", "clip_grad_norm", "reduce_gradients"]
