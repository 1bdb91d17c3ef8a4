"""Tensor-parallel layers, process groups, the failure watch, and collective operations outside the pipeline."""

from nxdpp.gradients.average import reduce_gradients
from nxdpp.gradients.followed_optimizers import followed_by_optimizers
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.gradients.gradient_reducer import GradientReducer
from nxdpp.parallel_layers import checkpointing as checkpointing
from nxdpp.parallel_layers import grads as grads
from nxdpp.parallel_layers import layers as layers
from nxdpp.parallel_layers import loss_functions as loss_functions
from nxdpp.parallel_layers import mappings as mappings
from nxdpp.parallel_layers import pad as pad
from nxdpp.parallel_layers import parallel_state as parallel_state
from nxdpp.parallel_layers import random as random
from nxdpp.parallel_layers import utils as utils
from nxdpp.tensor.checkpointing import load, save
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.move_model_to_device import move_model_to_device

__all__ = [
    "ColumnParallelLinear",
    "GradientReducer",
    "ParallelEmbedding",
    "RowParallelLinear",
    "clip_grad_norm",
    "followed_by_optimizers",
    "load",
    "move_model_to_device",
    "reduce_gradients",
    "save",
]


def __dir__() -> list[str]:
    submodules = ["checkpointing", "grads", "layers", "loss_functions", "mappings", "pad", "parallel_state", "random"]
    return [*__all__, *submodules, "utils"]
