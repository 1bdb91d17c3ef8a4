"""Batches that a tiny model trains on: three shapes, the second with padding."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests.zoo.shrinking import IMAGE, VOCABULARY

# Rows, tokens (or source tokens), target tokens.
SHAPES = ((4, 16, 8), (8, 24, 16), (4, 32, 24))
PADDED = 1
# Batch norm of a single pixel: the variance of a microbatch of one row is undefined.
NORMALISED_OVER_ROWS = {"levit"}
CODEBOOKS = {"musicgen_decoder", "musicgen_melody_decoder"}


def inputs(task: str, model: PreTrainedModel, shape_index: int) -> dict[str, Tensor]:
    """Arguments of ``model``'s forward with labels, on the CPU, the same at each call.

    Tokens are int64 ``(rows, tokens)``, of ``SHAPES[shape_index]``. Shape 1 alone has an ``attention_mask``: its rows
    end early, and labels are -100 from there on. Images are float32 ``(rows, channels, height, width)``.

    Raises ``ValueError`` if the forward takes no labels.
    """
    generator = torch.Generator().manual_seed(shape_index)
    taken = inspect.signature(model.forward).parameters
    if "labels" not in taken:
        raise ValueError(f"{type(model).__name__}.forward takes no labels.")
    if task == "image-classification":
        return _images(model, shape_index, generator)
    return _text(task, model, shape_index, generator)


def _text(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    config = model.config
    vocabulary = min(VOCABULARY, getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY)
    rows, length, target_length = SHAPES[shape_index]
    if config.model_type == "perceiver":
        length = config.max_position_embeddings  # its output has all positions

    def tokens(*shape: int) -> Tensor:
        return torch.randint(vocabulary // 4, vocabulary, shape, generator=generator)

    if config.model_type in CODEBOOKS:
        # Three dimensions: in the usual two, a batch could not be split by rows.
        batch = {"input_ids": tokens(rows, config.num_codebooks, length)}
        target = batch["input_ids"].transpose(1, 2)
    else:
        batch = {"input_ids": tokens(rows, length)}
        target = batch["input_ids"]
    if shape_index == PADDED:
        batch["attention_mask"] = _padding(rows, length)
    mask = batch.get("attention_mask")
    if task != "causal-lm" and config.is_encoder_decoder:
        target = tokens(rows, target_length)
        mask = _padding(rows, target_length) if shape_index == PADDED else None
    if mask is not None:
        target = target.masked_fill((mask == 0).view(*mask.shape, *[1] * (target.ndim - 2)), -100)
    batch["labels"] = target.clone()
    batch |= _other_inputs(config, batch, generator)
    taken = inspect.signature(model.forward).parameters
    names = {"inputs" if name == "input_ids" and "input_ids" not in taken else name: name for name in batch}
    return {name: batch[source] for name, source in names.items() if name in taken}


def _other_inputs(config: PreTrainedConfig, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs besides tokens that a type needs for its forward or its loss."""
    rows, length = batch["input_ids"].shape[0], batch["input_ids"].shape[-1]
    if config.model_type == "git":
        return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE, generator=generator)}
    if config.model_type == "fsmt":
        return {"decoder_input_ids": batch["labels"].clamp(min=0).roll(1, dims=1)}
    if config.model_type == "voxtral_realtime":
        frames = 2 * config.downsample_factor * length
        return {"input_features": torch.randn(rows, config.audio_config.num_mel_bins, frames, generator=generator)}
    return {}


def _padding(rows: int, length: int) -> Tensor:
    """(rows, length) of int64: row 0 is full, each next row one token shorter, with a period of four rows."""
    ends = length - torch.arange(rows) % 4
    return (torch.arange(length) < ends[:, None]).long()


def _images(model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images ``(rows, channels, height, width)``; sizes differ between shapes unless the configuration fixes them."""
    config = model.config
    rows = (4, 8, 12)[shape_index] * (2 if config.model_type in NORMALISED_OVER_ROWS else 1)
    assert config.num_labels is not None
    labels = torch.randint(config.num_labels, (rows,), generator=generator)
    if config.model_type == "imagegpt":
        pixels = torch.randint(config.vocab_size, (rows, SHAPES[shape_index][1]), generator=generator)
        return {"input_ids": pixels, "labels": labels}
    if config.model_type == "siglip2":
        return _patches(config.vision_config, rows, generator) | {"labels": labels}
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    size = size or IMAGE + 32 * (shape_index % 2)
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(rows, getattr(config, "num_channels", 3), height, width, generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def _patches(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    side = 4  # patches
    return {
        "pixel_values": torch.randn(rows, side * side, 3 * config.patch_size**2, generator=generator),
        "pixel_attention_mask": torch.ones(rows, side * side, dtype=torch.long),
        "spatial_shapes": torch.full((rows, 2), side),
    }
