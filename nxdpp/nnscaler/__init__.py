"""nnScaler's ways in: ``import nxdpp.nnscaler as nnscaler``.

``ComputeConfig`` needs no torch: the other names are imported at their first use.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType
from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.nnscaler.names import *

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


def _module_with(name: str) -> ModuleType:
    from nxdpp.nnscaler import names

    return names


__getattr__, __dir__ = late_names(__name__, __all__, _module_with)
