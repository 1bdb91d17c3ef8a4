"""nnScaler's ways in: ``import nxdpp.nnscaler as nnscaler``.

The names are imported at their first use: ``ComputeConfig`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.nnscaler.compute_config import ComputeConfig
    from nxdpp.nnscaler.deduped import (
        broadcast_weights,
        deduped_state_dict,
        deduped_state_dicts,
        load_deduped_state_dict,
    )
    from nxdpp.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType
    from nxdpp.nnscaler.merged import load_merged_state_dict, load_merged_state_dicts, merge_state_dicts
    from nxdpp.nnscaler.optimizer import build_optimizer
    from nxdpp.nnscaler.parallel_module import ParallelModule
    from nxdpp.nnscaler.parallel_optimizer import ParallelOptimizer
    from nxdpp.nnscaler.parallelization import parallelize

__all__ = [
    "BroadcastGenFilesStrategy",
    "ComputeConfig",
    "ParallelModule",
    "ParallelOptimizer",
    "ReuseType",
    "broadcast_weights",
    "build_optimizer",
    "deduped_state_dict",
    "deduped_state_dicts",
    "load_deduped_state_dict",
    "load_merged_state_dict",
    "load_merged_state_dicts",
    "merge_state_dicts",
    "parallelize",
]

_FILES = {
    "BroadcastGenFilesStrategy": "enums",
    "ComputeConfig": "compute_config",
    "ParallelModule": "parallel_module",
    "ParallelOptimizer": "parallel_optimizer",
    "ReuseType": "enums",
    "broadcast_weights": "deduped",
    "build_optimizer": "optimizer",
    "deduped_state_dict": "deduped",
    "deduped_state_dicts": "deduped",
    "load_deduped_state_dict": "deduped",
    "load_merged_state_dict": "merged",
    "load_merged_state_dicts": "merged",
    "merge_state_dicts": "merged",
    "parallelize": "parallelization",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"nxdpp.nnscaler.{_FILES[name]}"), name)
    raise AttributeError(f"module 'nxdpp.nnscaler' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
