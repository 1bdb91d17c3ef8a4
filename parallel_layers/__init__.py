"""Tensor-parallel layers, process groups, the failure watch, and collective operations outside the pipeline.

Names and submodules of NeuronX Distributed's ``parallel_layers`` are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nxdpp.parallel_layers.move_model_to_device import move_model_to_device

if TYPE_CHECKING:
    from nxdpp.parallel_layers.checkpointing import load, save
    from nxdpp.parallel_layers.followed_optimizers import followed_by_optimizers
    from nxdpp.parallel_layers.gradient_norm import clip_grad_norm
    from nxdpp.parallel_layers.gradient_reducer import GradientReducer
    from nxdpp.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
    from nxdpp.parallel_layers.reduced_gradients import reduce_gradients

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

_MODULES = {
    "ColumnParallelLinear": "layers",
    "GradientReducer": "gradient_reducer",
    "ParallelEmbedding": "layers",
    "RowParallelLinear": "layers",
    "clip_grad_norm": "gradient_norm",
    "followed_by_optimizers": "followed_optimizers",
    "load": "checkpointing",
    "reduce_gradients": "reduced_gradients",
    "save": "checkpointing",
}
_SUBMODULES = (
    "checkpointing",
    "grads",
    "layers",
    "loss_functions",
    "mappings",
    "pad",
    "parallel_state",
    "random",
    "utils",
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"nxdpp.parallel_layers.{name}")
    if name in _MODULES:
        return getattr(import_module(f"nxdpp.parallel_layers.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'nxdpp.parallel_layers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
