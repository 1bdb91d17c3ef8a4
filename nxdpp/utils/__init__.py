"""Import paths of NeuronX Distributed."""

from nxdpp.utils import adamw_fp32_optim_params, batch_utils, logger, model_utils

__all__ = ["adamw_fp32_optim_params", "batch_utils", "logger", "model_utils"]


def __dir__() -> list[str]:
    return __all__
