"""Tiny vision-language models with images, and batches of four rows for them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 128
ROWS, LENGTH = 4, 24
IMAGE, VIDEO, START, END = 5, 6, 7, 8
SIDE, PATCH, HIDDEN = 32, 8, 32

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": SIDE, "patch_size": PATCH,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def make_vision_language(name: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model of ``name``, one of ``VISION_LANGUAGE``, in training mode without a cache, and a batch of four rows."""
    torch.manual_seed(0)
    model, inputs = VISION_LANGUAGE[name]()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
    model.train()
    return model, inputs


def tokens(images: list[int], start: bool = False) -> Tensor:
    """Rows of ``LENGTH`` tokens, row ``r`` with ``images[r]`` image tokens, after a start token with ``start``."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, VOCABULARY, (len(images), LENGTH), generator=generator)
    for row, number in zip(ids, images, strict=True):
        row[2 : 2 + number] = IMAGE
        if start:
            row[1] = START
    return ids


def pixels(*shape: int) -> Tensor:
    """Random pixels, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _batch(image_tokens: int, **inputs: Tensor) -> dict[str, Tensor]:
    ids = tokens([image_tokens] * ROWS)
    return {"input_ids": ids, "pixel_values": pixels(ROWS, 3, SIDE, SIDE), "labels": ids.clone(), **inputs}


def _llava() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config), _batch(16)


def _gemma3() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=8),
        vision_config=transformers.SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    batch = _batch(4)
    batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return transformers.Gemma3ForConditionalGeneration(config), batch


def _paligemma() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**_TEXT, head_dim=8),
        vision_config=transformers.SiglipVisionConfig(**{**_VISION, "projection_dim": HIDDEN}),
        image_token_index=IMAGE,
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
    )
    suffix = (torch.arange(LENGTH) > 18).long().expand(ROWS, LENGTH).contiguous()
    batch = _batch(16, token_type_ids=suffix, attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.long))
    return transformers.PaliGemmaForConditionalGeneration(config), batch


def _qwen(model_class: Any, two_images: bool = True, **vision: Any) -> tuple[Any, dict[str, Tensor]]:
    vision = {"depth": 2, "hidden_size": HIDDEN, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, **vision}
    text = {**_TEXT, "rope_parameters": _ROPE}
    config = model_class.config_class(text_config=text, vision_config={"temporal_patch_size": 2, **vision}, **_TOKENS)
    ids = tokens([4, 4, 4, 4], start=True)
    if two_images:
        ids[2, 6:12] = torch.tensor([END, START, IMAGE, IMAGE, IMAGE, IMAGE])
    images = ROWS + two_images
    grid = torch.tensor([[1, 4, 4]] * images)
    batch = {
        "input_ids": ids,
        "pixel_values": pixels(images * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": grid,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "labels": ids.clone(),
    }
    return model_class(config), batch


def _qwen2() -> tuple[Any, dict[str, Tensor]]:
    return _qwen(transformers.Qwen2VLForConditionalGeneration, embed_dim=HIDDEN, mlp_ratio=2)


def _qwen2_5() -> tuple[Any, dict[str, Tensor]]:
    return _qwen(
        transformers.Qwen2_5_VLForConditionalGeneration,
        out_hidden_size=HIDDEN,
        intermediate_size=64,
        fullatt_block_indexes=[1],
        window_size=16,
    )


def _qwen3() -> tuple[Any, dict[str, Tensor]]:
    return _qwen(
        transformers.Qwen3VLForConditionalGeneration,
        two_images=False,
        out_hidden_size=HIDDEN,
        intermediate_size=64,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
    )


def _idefics3() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**_TEXT, pad_token_id=0),
        vision_config=_VISION,
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,  # type: ignore[call-arg]
    )
    # Two places for images in each row; the second of rows 1 and 3 is padding.
    images = pixels(ROWS, 2, 3, SIDE, SIDE)
    images[[1, 3], 1] = 0
    ids = tokens([8, 4, 8, 4])
    return transformers.Idefics3ForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": images,
        "labels": ids.clone(),
    }


def _internvl() -> tuple[Any, dict[str, Tensor]]:
    vision: dict[str, Any] = {**_VISION, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**_TEXT),
        vision_config=transformers.InternVLVisionConfig(**vision),
        image_token_id=IMAGE,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return transformers.InternVLForConditionalGeneration(config), _batch(4)


def _blip2() -> tuple[Any, dict[str, Tensor]]:
    text: dict[str, Any] = {
        "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "ffn_dim": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": HIDDEN, "dropout": 0.0,
        "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    }  # fmt: skip
    qformer: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "encoder_hidden_size": HIDDEN, "cross_attention_frequency": 1,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    config = transformers.Blip2Config(
        text_config=text, vision_config=_VISION, qformer_config=qformer, num_query_tokens=4, image_token_index=IMAGE
    )
    return transformers.Blip2ForConditionalGeneration(config), _batch(4)


VISION_LANGUAGE: dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]] = {
    "blip2": _blip2,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen2_5,
    "qwen2_vl": _qwen2,
    "qwen3_vl": _qwen3,
}
