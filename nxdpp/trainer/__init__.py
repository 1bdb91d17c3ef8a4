"""Trainer API of NeuronX Distributed: one configuration, a wrapped model and a wrapped optimizer."""

from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from nxdpp.doors.nxd.config import neuronx_distributed_config
from nxdpp.doors.nxd.model import NxDModel
from nxdpp.doors.nxd.optimizer import NxDOptimizer, initialize_parallel_optimizer
from nxdpp.doors.nxd.trainer import initialize_parallel_model

__all__ = [
    "NxDModel",
    "NxDOptimizer",
    "finalize_checkpoint",
    "has_checkpoint",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]


def __dir__() -> list[str]:
    return __all__
