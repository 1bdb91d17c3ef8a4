"""Other libraries' trainers over a pipeline: ``transformers.Trainer`` as ``PipelineTrainer``.

Its names are imported at their first use. They need the extra ``trainer``:
``pip install -c constraints.txt '.[trainer]'`` in the clone.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.doors.transformers.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]


def _module_with(name: str) -> ModuleType:
    try:
        from nxdpp.doors.transformers import trainer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "accelerate":
            raise
        raise ImportError(
            "nxdpp.integrations.PipelineTrainer needs accelerate, as transformers.Trainer does: install the extra, "
            "pip install -c constraints.txt '.[trainer]' in the clone of nxdpp."
        ) from error
    return trainer


__getattr__, __dir__ = late_names(__name__, __all__, _module_with)
