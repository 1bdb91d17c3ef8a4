"""Other libraries' trainers over a pipeline: ``transformers.Trainer`` as ``PipelineTrainer``, and its metrics.

Its names are imported at their first use. They need the extra ``trainer``:
``pip install -c constraints.txt '.[trainer]'`` in the clone.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.doors.transformers.metrics_callback import MetricsCallback
    from nxdpp.doors.transformers.trainer import PipelineTrainer

__all__ = ["MetricsCallback", "PipelineTrainer"]


def _module_with(name: str) -> ModuleType:
    try:
        from nxdpp.doors.transformers import metrics_callback, trainer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "accelerate":
            raise
        raise ImportError(
            f"nxdpp.integrations.{name} needs accelerate, as transformers.Trainer does: install the extra, "
            "pip install -c constraints.txt '.[trainer]' in the clone of nxdpp."
        ) from error
    return metrics_callback if name == "MetricsCallback" else trainer


__getattr__, __dir__ = late_names(__name__, __all__, _module_with)
