"""Other libraries' trainers over a pipeline: transformers' ``Trainer``, and TRL's for fine-tuning and rewards.

Its names are imported at their first use. They need the extra ``trainer``, TRL's the extra ``trl``:
``pip install -c constraints.txt '.[trl]'`` in the clone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.doors.transformers.metrics_callback import MetricsCallback
    from nxdpp.doors.transformers.trainer import PipelineTrainer
    from nxdpp.doors.trl.dpo import PipelineDPOTrainer
    from nxdpp.doors.trl.reward import PipelineRewardTrainer
    from nxdpp.doors.trl.sft import PipelineSFTTrainer

__all__ = ["MetricsCallback", "PipelineDPOTrainer", "PipelineRewardTrainer", "PipelineSFTTrainer", "PipelineTrainer"]

_LIBRARIES = ("accelerate", "datasets", "peft", "trl")

if not TYPE_CHECKING:
    # Type checkers report names that do not exist.
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            if name == "MetricsCallback":
                from nxdpp.doors.transformers import metrics_callback as module
            elif name == "PipelineTrainer":
                from nxdpp.doors.transformers import trainer as module
            elif name == "PipelineDPOTrainer":
                from nxdpp.doors.trl import dpo as module
            elif name == "PipelineRewardTrainer":
                from nxdpp.doors.trl import reward as module
            else:
                from nxdpp.doors.trl import sft as module
            return getattr(module, name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _LIBRARIES:
                raise
            extra = "trainer" if name in ("MetricsCallback", "PipelineTrainer") else "trl"
            raise ImportError(
                f"nxdpp.integrations.{name} needs {missing}: install the extra, pip install -c constraints.txt "
                f"'.[{extra}]' in the clone of nxdpp."
            ) from error


def __dir__() -> list[str]:
    return __all__
