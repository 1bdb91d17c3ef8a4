"""Text with an image in each row, for vision-language models."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tools.zoo.inputs import text
from tools.zoo.inputs.images import patches, size_of
from tools.zoo.inputs.shapes import PADDED, SHAPES, no_labels, padding, taken
from tools.zoo.shrinking import VOCABULARY

# Types that get text alone: their images need a preparation of their own.
TEXT_ALONE = {
    "deepseek_ocr2",
    "dots3_note",
    "emu3",
    "granite_docling",
    "granite4_vision",
    "inkling_mm_model",
    "kimi_k25",
    "lfm2_vl",
    "minicpm_ocr",
    "minicpmv4_6",
    "minicpmv4_7",
    "mllama",
    "muse_glimmer",
    "muse_spark",
    "nemotron_h_omni",
    "unlimited_ocr",
}
# Types with a second dimension of images in each row.
_SEVERAL_IMAGES = {"granite_docling", "idefics", "idefics2", "idefics3", "modernvbert", "smolvlm"}
# Types with a second dimension of crops of an image, the first of which is the whole image.
_CROPS = {"llava_next": 2, "llava_next_video": 2, "llava_onevision": 2}
# Types whose patches of a grid have a height and a width.
_SQUARE_PATCHES = {"paddleocr_vl"}
_SIDE = 4  # patches of an image in a grid, in height and in width
_BEFORE = 2  # tokens before the image


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens and an image in each row; tokens alone for ``TEXT_ALONE``."""
    if task == "image-text-to-text":
        if "labels" not in taken(model):
            raise no_labels(model)
        if model.config.model_type in TEXT_ALONE:
            return text.batch(task, model, shape_index, generator)
        if hasattr(model, "get_image_features"):
            return _among_tokens(model, shape_index, generator)
    return _beside_text(task, model, shape_index, generator)


def _among_tokens(model: Any, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens of an image in each row, at whose places its features stand."""
    rows, length, _ = SHAPES[shape_index]
    config, names = model.config, taken(model)
    images = _pixels(model, rows, shape_index, generator)
    count = _features_of_an_image(model, {name: value[: len(value) // rows] for name, value in images.items()})
    length = max(length, _BEFORE + count + 8)
    vocabulary = min(VOCABULARY, config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary // 4, vocabulary, (rows, length), generator=generator)
    is_image = torch.zeros_like(ids, dtype=torch.bool)
    is_image[:, _BEFORE : _BEFORE + count] = True
    ids[is_image] = image_token(config)
    if (start := getattr(config, "vision_start_token_id", None)) is not None:
        ids[:, _BEFORE - 1] = start
    mask = padding(rows, length) if shape_index == PADDED else torch.ones_like(ids)
    given: dict[str, Tensor] = {"input_ids": ids, **images, "labels": ids.masked_fill(mask == 0, -100)}
    if shape_index == PADDED:
        given["attention_mask"] = mask
    given |= {name: is_image.long() for name in ("token_type_ids", "mm_token_type_ids") if name in names}
    return given


def image_token(config: PreTrainedConfig) -> int:
    token = _first(config, "image_token_id", "image_token_index")
    assert token is not None
    return token


def _pixels(model: PreTrainedModel, rows: int, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images in the form that ``model`` takes: a grid of patches, or a height and a width."""
    names = taken(model)
    if "image_grid_thw" in names:
        vision: Any = getattr(model.config, "vision_config", model.config)
        channels = _first(vision, "in_channels", "num_channels") or 3
        frames = _first(vision, "temporal_patch_size", "patch_temporal") or 1
        values = torch.randn(rows * _SIDE**2, channels * frames * vision.patch_size**2, generator=generator)
        if model.config.model_type in _SQUARE_PATCHES:
            values = values.view(rows * _SIDE**2, channels, vision.patch_size, vision.patch_size)
        given = {"pixel_values": values, "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]] * rows)}
        if "image_merge_sizes" in names:
            given["image_merge_sizes"] = torch.full((rows,), 2)
        return given
    images = _images(model, rows, shape_index, generator)
    crops = _CROPS.get(model.config.model_type)
    if crops is not None:
        given = {"pixel_values": images.unsqueeze(1).repeat(1, crops, 1, 1, 1)}
    elif model.config.model_type in _SEVERAL_IMAGES:
        given = {"pixel_values": images.unsqueeze(1)}
        if "pixel_attention_mask" in names:
            given["pixel_attention_mask"] = torch.ones(rows, 1, *images.shape[-2:], dtype=torch.bool)
    else:
        given = {"pixel_values": images}
    if "image_sizes" in names and model.config.model_type != "llava":
        given["image_sizes"] = torch.tensor([list(images.shape[-2:])] * rows)
    if "qformer_input_ids" in names:
        given["qformer_input_ids"] = torch.randint(32, VOCABULARY, (rows, 4), generator=generator)
    return given


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _features_of_an_image(model: Any, image: dict[str, Tensor]) -> int:
    """The number of tokens whose places one image takes."""
    mode = model.training
    model.eval()
    methods = (part.get_image_features for part in (model, model.base_model) if hasattr(part, "get_image_features"))
    takes = {name for method in methods for name in inspect.signature(method).parameters}
    with torch.no_grad():
        output = model.get_image_features(**{name: value for name, value in image.items() if name in takes})
    model.train(mode)
    features = output if isinstance(output, torch.Tensor | list | tuple) else output.pooler_output
    features = output.last_hidden_state if features is None else features
    pieces = features if isinstance(features, list | tuple) else [features]
    return sum(piece.numel() // piece.shape[-1] for piece in pieces)


def _beside_text(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """An image that is an input of its own, with a text."""
    rows, length, _ = SHAPES[shape_index]
    if task == "zero-shot-image-classification":
        rows *= 2  # with one row in a microbatch there is nothing to tell apart
    given = {"pixel_values": _images(model, rows, shape_index, generator)}
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary // 4, vocabulary, (rows, length), generator=generator)
    if task == "zero-shot-image-classification":
        if model.config.model_type == "siglip2":
            given = patches(model.config.vision_config, rows, generator)
        if model.config.model_type == "videoprism":
            given = {"pixel_values_videos": given["pixel_values"].unsqueeze(1).repeat(1, 4, 1, 1, 1)}
        return {"input_ids": tokens, **given}
    if task == "visual-question-answering" and model.config.model_type == "vilt":
        labels = torch.rand(rows, model.config.num_labels or 2, generator=generator)
        return {"input_ids": tokens, **given, "labels": labels}
    if "flattened_patches" in taken(model):
        vision = model.config.vision_config
        values = torch.randn(rows, _SIDE**2, 2 + vision.patch_embed_hidden_size, generator=generator)
        values[:, :, :2] = torch.arange(1, _SIDE**2 + 1)[:, None] % _SIDE + 1
        given = {"flattened_patches": values}
    if "bbox" in taken(model):
        given["bbox"] = torch.rand(rows, length, 4, generator=generator)
    if "qformer_input_ids" in taken(model):
        given["qformer_input_ids"] = tokens.clone()
    if "input_ids" not in taken(model):
        return {**given, "labels": tokens}
    return {"input_ids": tokens, **given, "labels": tokens.clone()}


def _images(model: PreTrainedModel, rows: int, shape_index: int, generator: torch.Generator) -> Tensor:
    config = model.config
    height, width = size_of(getattr(config, "encoder", config), shape_index)
    return torch.randn(rows, 3, height, width, generator=generator)
