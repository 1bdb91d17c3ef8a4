"""Tensor-parallel layers, process groups, the failure watch, and collective operations outside the pipeline."""

from nxdpp.gradients.average import reduce_gradients
from nxdpp.gradients.followed_optimizers import followed_by_optimizers
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.gradients.gradient_reducer import GradientReducer
from nxdpp.parallel_layers import checkpointing as checkpointing
from nxdpp.parallel_layers import grads as grads
from nxdpp.parallel_layers import layer_norm as layer_norm
from nxdpp.parallel_layers import layers as layers
from nxdpp.parallel_layers import loss_functions as loss_functions
from nxdpp.parallel_layers import mappings as mappings
from nxdpp.parallel_layers import pad as pad
from nxdpp.parallel_layers import parallel_state as parallel_state
from nxdpp.parallel_layers import random as random
from nxdpp.parallel_layers import utils as utils
from nxdpp.ranks.parallel_state import initialize_model_parallel as initialize_model_parallel
from nxdpp.tensor.checkpointing import load, save
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.loss_functions import parallel_cross_entropy as parallel_cross_entropy
from nxdpp.tensor.mappings import copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region
from nxdpp.tensor.mappings import gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region
from nxdpp.tensor.mappings import reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region
from nxdpp.tensor.mappings import scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tensor.random import get_xla_rng_tracker as get_xla_rng_tracker
from nxdpp.tensor.random import model_parallel_xla_manual_seed as model_parallel_xla_manual_seed
from nxdpp.tensor.utils import copy_tensor_model_parallel_attributes as copy_tensor_model_parallel_attributes
from nxdpp.tensor.utils import set_tensor_model_parallel_attributes as set_tensor_model_parallel_attributes
from nxdpp.tensor.utils import split_tensor_along_last_dim as split_tensor_along_last_dim

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
    return [name for name in globals() if not name.startswith("_")]
