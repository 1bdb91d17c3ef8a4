"""Images and videos, with the labels of a task."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tools.zoo.inputs.shapes import SHAPES, no_labels, taken
from tools.zoo.shrinking import IMAGE

# Batch norm of a single pixel: the variance of a microbatch of one row is undefined.
NORMALISED_OVER_ROWS = {"levit"}
_NORMALISED_TASKS = ("semantic-segmentation", "backbone", "object-detection", "universal-segmentation")
FRAMES = 4
OBJECTS = 3
_WITHOUT_LABELS = (
    "backbone",
    "image-encoding",
    "depth-estimation",
    "image-to-image",
    "pose-estimation",
    "normal-estimation",
    "pointmap-estimation",
    "image-matting",
    "text-recognition",
)


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images ``(rows, channels, height, width)``; sizes differ between shapes unless the configuration fixes them."""
    config = model.config
    twice = config.model_type in NORMALISED_OVER_ROWS or task in _NORMALISED_TASKS
    rows = (4, 8, 12)[shape_index] * (2 if twice else 1)
    if config.model_type == "imagegpt":
        pixels = torch.randint(config.vocab_size, (rows, SHAPES[shape_index][1]), generator=generator)
        given = {"input_ids": pixels}
    elif config.model_type == "siglip2":
        given = patches(config.vision_config, rows, generator)
    else:
        given = {_pixels_name(model): _pixels(task, config, rows, shape_index, generator)}
    return given | _labels(task, model, next(iter(given.values())), generator)


def size_of(config: PreTrainedConfig, shape_index: int) -> tuple[int, int]:
    """Height and width in pixels."""
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    if size is None and getattr(config, "backbone_config", None) is not None:
        size = getattr(config.backbone_config, "image_size", None)
    size = size or IMAGE + 32 * (shape_index % 2)
    if isinstance(size, int):
        return size, size
    return size[0], size[1]


def patches(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images in patches, for SigLIP 2."""
    side = 4  # patches
    return {
        "pixel_values": torch.randn(rows, side * side, 3 * config.patch_size**2, generator=generator),
        "pixel_attention_mask": torch.ones(rows, side * side, dtype=torch.long),
        "spatial_shapes": torch.full((rows, 2), side),
    }


def _pixels_name(model: PreTrainedModel) -> str:
    return "pixel_values_videos" if "pixel_values_videos" in taken(model) else "pixel_values"


def _pixels(task: str, config: PreTrainedConfig, rows: int, shape_index: int, generator: torch.Generator) -> Tensor:
    height, width = _line(config) if task == "text-recognition" else size_of(config, shape_index)
    channels = getattr(getattr(config, "backbone_config", None), "num_channels", None)
    shape = [rows, getattr(config, "num_channels", None) or channels or 3, height, width]
    if task == "video-classification" or config.model_type in ("timesformer", "videomae", "vivit"):
        frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None) or FRAMES
        shape.insert(1, frames)
    return torch.randn(*shape, generator=generator)


def _line(config: PreTrainedConfig) -> tuple[int, int]:
    """Height and width of a line of text, whose last map has one row."""
    return (96, 128) if config.model_type.startswith("pp_ocrv5") else (48, 64)


def _labels(task: str, model: PreTrainedModel, pixels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    rows, classes = pixels.size(0), getattr(model.config, "num_labels", None) or 2
    if task in _WITHOUT_LABELS:
        return {}
    if task == "masked-image-modeling":
        side = pixels.size(-1) // model.config.patch_size
        return {"bool_masked_pos": torch.rand(rows, side * side, generator=generator) < 0.5}
    if task == "object-detection":
        boxes = torch.rand(rows, OBJECTS, 4, generator=generator) * 0.25 + 0.25
        return {"class_labels": torch.randint(classes, (rows, OBJECTS), generator=generator), "boxes": boxes}
    if task == "universal-segmentation":
        masks = (torch.rand(rows, OBJECTS, *pixels.shape[-2:], generator=generator) < 0.5).float()
        return {"class_labels": torch.randint(classes, (rows, OBJECTS), generator=generator), "mask_labels": masks}
    if "labels" not in taken(model):
        raise no_labels(model)
    if task == "causal-image-modeling":
        return {"labels": pixels.clamp(max=model.config.vocab_size - 2)}
    if task == "semantic-segmentation":
        return {"labels": torch.randint(classes, (rows, *pixels.shape[-2:]), generator=generator)}
    return {"labels": torch.randint(classes, (rows,), generator=generator)}
