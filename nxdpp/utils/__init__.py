"""Import paths of NeuronX Distributed.

Submodules are imported at their first use.
"""

from importlib import import_module
from typing import Any

__all__ = ["adamw_fp32_optim_params", "logger", "model_utils"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"nxdpp.utils.{name}")
    raise AttributeError(f"module 'nxdpp.utils' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
