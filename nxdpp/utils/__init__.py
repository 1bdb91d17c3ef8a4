"""Import paths of NeuronX Distributed.

Submodules are imported at their first use: the logger needs no torch.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.utils import adamw_fp32_optim_params, batch_utils, logger, model_utils

__all__ = ["adamw_fp32_optim_params", "batch_utils", "logger", "model_utils"]


def _module_with(name: str) -> ModuleType:
    import nxdpp.utils.adamw_fp32_optim_params
    import nxdpp.utils.batch_utils
    import nxdpp.utils.logger
    import nxdpp.utils.model_utils

    return nxdpp.utils


__getattr__, __dir__ = late_names(__name__, __all__, _module_with)
