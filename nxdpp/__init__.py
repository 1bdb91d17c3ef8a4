"""nxdpp: pipeline-parallel training of unmodified PyTorch and Hugging Face models.

The public names are imported at their first use, so that ``nxdpp.schedules`` works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.checkpoint.distributed.whole_state import gather_state_dict
    from nxdpp.checkpoint.huggingface.load import load_pretrained
    from nxdpp.checkpoint.huggingface.load_report import LoadReport
    from nxdpp.checkpoint.huggingface.save import save_pretrained
    from nxdpp.devices.memory import device_memory
    from nxdpp.initialization.deferred_init import deferred_init
    from nxdpp.initialization.init_on_device import init_on_device
    from nxdpp.parallel_layers import parallel_state
    from nxdpp.parallel_layers.grad_scaler import GradScaler
    from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
    from nxdpp.pipeline.config import PipelineConfig
    from nxdpp.pipeline.model import NxDPPModel
    from nxdpp.pipeline.pipeline import Pipeline
    from nxdpp.pipeline.planning.planner import plan
    from nxdpp.pipeline.replicas.tensor_copies import compare_tensor_copies
    from nxdpp.pipeline.traced_layers import TracedLayers, trace_layers
    from nxdpp.tensor_parallel.comparison import check_tensor_parallel
    from nxdpp.tensor_parallel.known_plan import tensor_plan
    from nxdpp.tensor_parallel.parallelize import tensor_parallelize
    from nxdpp.trainer.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
    from nxdpp.trainer.config import neuronx_distributed_config
    from nxdpp.trainer.optimizer import initialize_parallel_optimizer
    from nxdpp.trainer.trainer import initialize_parallel_model

__all__ = [
    "GradScaler",
    "LoadReport",
    "NxDPPModel",
    "Pipeline",
    "PipelineConfig",
    "TracedLayers",
    "apply_checkpoint",
    "check_tensor_parallel",
    "compare_tensor_copies",
    "deferred_init",
    "device_memory",
    "finalize_checkpoint",
    "gather_state_dict",
    "has_checkpoint",
    "init_on_device",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "load_pretrained",
    "neuronx_distributed_config",
    "parallel_state",
    "plan",
    "save_checkpoint",
    "save_pretrained",
    "tensor_parallelize",
    "tensor_plan",
    "trace_layers",
]

_MODULES = {
    "GradScaler": "nxdpp.parallel_layers.grad_scaler",
    "LoadReport": "nxdpp.checkpoint.huggingface.load_report",
    "NxDPPModel": "nxdpp.pipeline.model",
    "Pipeline": "nxdpp.pipeline.pipeline",
    "PipelineConfig": "nxdpp.pipeline.config",
    "TracedLayers": "nxdpp.pipeline.traced_layers",
    "apply_checkpoint": "nxdpp.pipeline.activation_checkpoint",
    "check_tensor_parallel": "nxdpp.tensor_parallel.comparison",
    "compare_tensor_copies": "nxdpp.pipeline.replicas.tensor_copies",
    "device_memory": "nxdpp.devices.memory",
    "deferred_init": "nxdpp.initialization.deferred_init",
    "finalize_checkpoint": "nxdpp.trainer.checkpoint",
    "gather_state_dict": "nxdpp.checkpoint.distributed.whole_state",
    "has_checkpoint": "nxdpp.trainer.checkpoint",
    "init_on_device": "nxdpp.initialization.init_on_device",
    "initialize_parallel_model": "nxdpp.trainer.trainer",
    "initialize_parallel_optimizer": "nxdpp.trainer.optimizer",
    "load_checkpoint": "nxdpp.trainer.checkpoint",
    "load_pretrained": "nxdpp.checkpoint.huggingface.load",
    "neuronx_distributed_config": "nxdpp.trainer.config",
    "plan": "nxdpp.pipeline.planning.planner",
    "save_checkpoint": "nxdpp.trainer.checkpoint",
    "save_pretrained": "nxdpp.checkpoint.huggingface.save",
    "tensor_parallelize": "nxdpp.tensor_parallel.parallelize",
    "tensor_plan": "nxdpp.tensor_parallel.known_plan",
    "trace_layers": "nxdpp.pipeline.traced_layers",
}

_PACKAGES = ("modules", "optimizer", "parallel_layers", "pipeline", "trainer", "utils")


def __getattr__(name: str) -> Any:
    if name == "parallel_state":
        return import_module("nxdpp.parallel_layers.parallel_state")
    if name in _PACKAGES:
        return import_module(f"nxdpp.{name}")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'nxdpp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
