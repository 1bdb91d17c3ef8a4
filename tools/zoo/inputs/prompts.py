"""Images with points, and the masks of the objects at these points."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.zoo.inputs.images import size_of

POINTS = 2


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images, ``input_points`` ``(rows, 1, points, 2)`` in pixels and ``input_labels`` ``(rows, 1, points)``."""
    rows = (4, 8, 12)[shape_index]
    height, width = size_of(model.config.prompt_encoder_config, shape_index)
    return {
        "pixel_values": torch.randn(rows, 3, height, width, generator=generator),
        "input_points": torch.rand(rows, 1, POINTS, 2, generator=generator) * min(height, width),
        "input_labels": torch.randint(2, (rows, 1, POINTS), generator=generator),
    }
