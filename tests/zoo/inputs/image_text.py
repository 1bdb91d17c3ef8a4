"""Text with an image in each row, for vision-language models."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.zoo.inputs import text
from tests.zoo.inputs.images import patches, size_of
from tests.zoo.inputs.shapes import SHAPES, no_labels, taken


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Text alone where the image is optional; otherwise each row has an image too."""
    if task == "image-text-to-text":
        if "labels" not in taken(model):
            raise no_labels(model)
        if "input_ids" in taken(model):
            return text.batch(task, model, shape_index, generator)
    rows, length, _ = SHAPES[shape_index]
    if task == "zero-shot-image-classification":
        rows *= 2  # with one row in a microbatch there is nothing to tell apart
    given = {"pixel_values": _images(model, rows, shape_index, generator)}
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary // 4, vocabulary, (rows, length), generator=generator)
    if task == "zero-shot-image-classification":
        if model.config.model_type == "siglip2":
            given = patches(model.config.vision_config, rows, generator)
        return {"input_ids": tokens, **given}
    if task == "visual-question-answering" and model.config.model_type == "vilt":
        labels = torch.rand(rows, model.config.num_labels or 2, generator=generator)
        return {"input_ids": tokens, **given, "labels": labels}
    return (
        {"input_ids": tokens, **given, "labels": tokens.clone()}
        if "input_ids" in taken(model)
        else {
            **given,
            "labels": tokens,
        }
    )


def _images(model: PreTrainedModel, rows: int, shape_index: int, generator: torch.Generator) -> Tensor:
    config = model.config
    height, width = size_of(getattr(config, "encoder", config), shape_index)
    return torch.randn(rows, 3, height, width, generator=generator)
