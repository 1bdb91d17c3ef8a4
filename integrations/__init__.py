"""Other libraries' trainers over a pipeline: ``transformers.Trainer`` as ``PipelineTrainer``.

Its names are imported at their first use. They need the extra ``trainer``:
``pip install -c constraints.txt '.[trainer]'`` in the clone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.integrations.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]


def __getattr__(name: str) -> Any:
    if name != "PipelineTrainer":
        raise AttributeError(f"module 'nxdpp.integrations' has no attribute {name!r}")
    try:
        import_module("accelerate")
    except ImportError as error:
        raise ImportError(
            "nxdpp.integrations.PipelineTrainer needs accelerate, as transformers.Trainer does: install the extra, "
            "pip install -c constraints.txt '.[trainer]' in the clone of nxdpp."
        ) from error
    return import_module("nxdpp.integrations.trainer").PipelineTrainer


def __dir__() -> list[str]:
    return __all__
