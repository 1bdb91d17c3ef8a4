"""Series of numbers with a class, a value or a continuation."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.zoo.inputs.shapes import SHAPES


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """``past_values (rows, steps, channels)`` and ``target_values`` or ``future_values``."""
    config, rows = model.config, SHAPES[shape_index][0]
    channels = config.num_input_channels
    past = torch.randn(rows, config.context_length, channels, generator=generator)
    if task == "time-series-classification":
        return {"past_values": past, "target_values": torch.randint(config.num_targets, (rows,), generator=generator)}
    if task == "time-series-regression":
        return {"past_values": past, "target_values": torch.rand(rows, config.num_targets, generator=generator)}
    future = torch.rand(rows, config.prediction_length, channels, generator=generator)
    return {"past_values": past, "future_values": future}
