"""Config of the Llama to train, which transformers checks. Nothing here is collective."""

import checks
import torch
from model_fields import check_fields
from settings import Settings
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.schedules.chosen import ChosenSchedule


def checked_config(settings: Settings) -> LlamaConfig:
    """Return the config of the ``settings``; raises ``ValueError`` for a model that cannot run."""
    file = settings.config_file
    if file is None:
        config = LlamaConfig(**settings.fields)
    else:
        try:
            config = LlamaConfig.from_dict(settings.fields)
            with torch.device("meta"):
                LlamaForCausalLM(config)(torch.zeros(1, 2, dtype=torch.long))
        # Wrong fields raise different errors: KeyError, AssertionError, StrictDataclassError of huggingface_hub.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"no Llama runs with {file}: {type(error).__name__}: {reason}") from error
        # Fields that the file does not have keep transformers' defaults.
        fields = config.to_dict()
        check_fields(fields, file)
        schedule = ChosenSchedule(
            settings.schedule,
            settings.pipeline_parallel_size,
            settings.num_microbatches,
            settings.virtual_pipeline_size,
        )
        checks.check_model(fields, settings, schedule.placement.stages)
    if settings.device == "xla" and settings.dtype != "float32":
        # Autocast on XLA leaves the inputs of the fused attention in two dtypes.
        config._attn_implementation = "eager"
    return config
