"""Tensor-parallel layers, process groups, the failure watch, and collective operations outside the pipeline."""

from nxdpp.parallel_layers.gradient_norm import clip_grad_norm
from nxdpp.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.parallel_layers.move_model_to_device import move_model_to_device

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "clip_grad_norm",
    "move_model_to_device",
]
