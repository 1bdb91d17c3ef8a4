"""Batches that a tiny model trains on: three shapes, the second with padding."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.zoo_models.shrinking import FIRST_TOKEN, IMAGE, VOCABULARY

# Rows, tokens (or source tokens), target tokens.
SHAPES = ((4, 16, 8), (8, 24, 16), (4, 32, 24))
PADDED = 1
NEEDS_IMAGES = {"git"}  # their loss is wrong without


def inputs(task: str, model: PreTrainedModel, shape_index: int) -> dict[str, Tensor]:
    """Arguments of ``model``'s forward, labels included, on the CPU, the same at each call.

    Tokens are int64 of ``SHAPES[shape_index]``; ``attention_mask`` is there for shape 1 only, where rows end early
    and labels are -100 from there on. Images are float32, (rows, channels, height, width).
    ValueError where the forward takes no labels.
    """
    generator = torch.Generator().manual_seed(shape_index)
    taken = inspect.signature(model.forward).parameters
    if "labels" not in taken:
        raise ValueError(f"{type(model).__name__}.forward takes no labels.")
    if task == "image-classification":
        return _images(model, shape_index, generator)
    rows, length, target_length = SHAPES[shape_index]
    batch = {"input_ids": _tokens(rows, length, generator)}
    if shape_index == PADDED:
        batch["attention_mask"] = _padding(rows, length)
    if task == "causal-lm" or not model.config.is_encoder_decoder:
        target, mask = batch["input_ids"], batch.get("attention_mask")
    else:
        target = _tokens(rows, target_length, generator)
        mask = _padding(rows, target_length) if shape_index == PADDED else None
    batch["labels"] = target.clone() if mask is None else target.masked_fill(mask == 0, -100)
    if model.config.model_type in NEEDS_IMAGES:
        batch["pixel_values"] = torch.randn(rows, 3, IMAGE, IMAGE, generator=generator)
    return {name: value for name, value in batch.items() if name in taken}


def _tokens(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST_TOKEN, VOCABULARY, (rows, length), generator=generator)


def _padding(rows: int, length: int) -> Tensor:
    """(rows, length) of int64: the first row is whole, each next one token shorter, again after four rows."""
    ends = length - torch.arange(rows) % 4
    return (torch.arange(length) < ends[:, None]).long()


def _images(model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    rows = (4, 8, 12)[shape_index]
    size = getattr(model.config, "image_size", None) or IMAGE * (shape_index + 1)
    channels = getattr(model.config, "num_channels", 3)
    return {
        "pixel_values": torch.randn(rows, channels, size, size, generator=generator),
        "labels": torch.randint(model.config.num_labels, (rows,), generator=generator),
    }
