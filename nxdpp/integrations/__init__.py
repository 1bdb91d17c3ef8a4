"""Other libraries' trainers over a pipeline: transformers' ``Trainer``, and TRL's for fine-tuning and rewards.

Its names are imported at their first use. They need the extra ``trainer``, TRL's the extra ``trl``:
``pip install -c constraints.txt '.[trl]'`` in the clone.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.doors.transformers.metrics_callback import MetricsCallback
    from nxdpp.doors.transformers.trainer import PipelineTrainer
    from nxdpp.doors.trl.dpo import PipelineDPOTrainer
    from nxdpp.doors.trl.reward import PipelineRewardTrainer
    from nxdpp.doors.trl.sft import PipelineSFTTrainer

__all__ = ["MetricsCallback", "PipelineDPOTrainer", "PipelineRewardTrainer", "PipelineSFTTrainer", "PipelineTrainer"]

_LIBRARIES = ("accelerate", "datasets", "peft", "trl")


def _module_with(name: str) -> ModuleType:
    try:
        if name == "MetricsCallback":
            from nxdpp.doors.transformers import metrics_callback

            return metrics_callback
        if name == "PipelineTrainer":
            from nxdpp.doors.transformers import trainer

            return trainer
        from nxdpp.doors.trl import dpo, reward, sft
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _LIBRARIES:
            raise
        extra = "trainer" if name in ("MetricsCallback", "PipelineTrainer") else "trl"
        raise ImportError(
            f"nxdpp.integrations.{name} needs {missing}: install the extra, pip install -c constraints.txt "
            f"'.[{extra}]' in the clone of nxdpp."
        ) from error
    return {"PipelineSFTTrainer": sft, "PipelineDPOTrainer": dpo, "PipelineRewardTrainer": reward}[name]


__getattr__, __dir__ = late_names(__name__, __all__, _module_with)
