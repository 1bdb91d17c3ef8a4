"""nnScaler's ways in: ``import nxdpp.nnscaler as nnscaler``.

``ComputeConfig`` needs no torch: the other names are imported at their first use.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType
from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.nnscaler import parallel as parallel
    from nxdpp.nnscaler import runtime as runtime
    from nxdpp.nnscaler.parallel import *

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
    "init",
    "load_deduped_state_dict",
    "load_merged_state_dict",
    "load_merged_state_dicts",
    "load_sharded_state_dict",
    "merge_state_dicts",
    "parallelize",
    "register_op",
    "sync_grad_when",
    "uninit",
]
_MODULES = ("parallel", "runtime")


def _module_with(name: str) -> ModuleType:
    import nxdpp.nnscaler.parallel
    import nxdpp.nnscaler.runtime

    return nxdpp.nnscaler if name in _MODULES else nxdpp.nnscaler.parallel


__getattr__, __dir__ = late_names(__name__, [*__all__, *_MODULES], _module_with)
