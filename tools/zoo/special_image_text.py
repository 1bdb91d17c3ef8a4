"""Settings of vision-language models, whose parts must fit, with small ids for the tokens of images."""

from typing import Any

_IMAGE, _VIDEO, _START, _END = 5, 6, 7, 8
_TOKENS = {"image_token_id": _IMAGE, "video_token_id": _VIDEO, "vision_start_token_id": _START}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def _sections(*section: int) -> dict[str, Any]:
    """Rotary positions in parts of the head, which sum to half of its size."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


def _letters(number: int) -> str:
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


_QWEN = {"text_config": _sections(2, 3, 3), **_TOKENS}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 2]}
_CODES = 16
_CHAMELEON_NAMES = {"<image>": _IMAGE} | {f"IMGIMG{_letters(code)}Z": 32 + code for code in range(_CODES)}
_EMU3_NAMES = {"<image>": _IMAGE, "<|extra_200|>": _VIDEO} | {
    f"<|visual token {code:06d}|>": 32 + code for code in range(_CODES)
}

IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "chameleon": {
        "vocabulary_map": _CHAMELEON_NAMES,
        "vq_config": {"num_embeddings": _CODES, "base_channels": 32, "resolution": 64, "embed_dim": 16},
    },
    "cosmos3_omni": {"vision_config": _DEEPSTACK},
    "qwen3_vl": {"vision_config": _DEEPSTACK},
    "qwen3_vl_moe": {"vision_config": _DEEPSTACK},
    "cosmos3_edge": {"text_config": _sections(2, 3, 3) | {"head_dim": 16}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "num_experts_per_tok": 2}
    },
    "diffusion_gemma": {"text_config": _EXPERTS},
    "emu3": {
        "vocabulary_map": _EMU3_NAMES,
        "vq_config": {"codebook_size": _CODES, "base_channels": 32},
    },
    "ernie4_5_vl_moe": {"text_config": _sections(2, 2, 4)},
    "glm46v": _QWEN,
    "glm4v": _QWEN,
    "glm4v_moe": {"text_config": _sections(1, 1, 2)},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "glm_ocr": _QWEN,
    "glmga": _QWEN,
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1, 2],
        "downsample_rate": "1/2",
    },
    "hunyuan_vl": {"text_config": _sections(2, 2, 2, 2) | {"head_dim": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "muse_spark": {"audio_config": {"hidden_sizes": (16, 16, 32, 32)}, "projector_hidden_size": 64},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl": _QWEN,
    "qwen2_5_omni_thinker": {"text_config": _sections(2, 3, 3), "vision_start_token_id": _START},
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN | {"vision_config": {"embed_dim": 64}},
    "aria": {"projector_patch_to_query_dict": {64: 16}},
    "blip-2": {"image_token_index": _IMAGE, "num_query_tokens": 4, "qformer_config": {"use_qformer_text_input": True}},
    "instructblip": {"image_token_index": _IMAGE, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": _VIDEO, "num_query_tokens": 4},
    "llava_next": {"image_grid_pinpoints": [[64, 64]]},
    "llava_next_video": {"image_grid_pinpoints": [[64, 64]]},
    "llava_onevision": {"image_grid_pinpoints": [[64, 64]]},
    "llama4": {"vision_config": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "colqwen2": {"vlm_config": _QWEN},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": _START, "vision_config": _DEEPSTACK},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "vision-encoder-decoder": {"pad_token_id": 0},
    "cohere_compass": {
        "vision_config": _DEEPSTACK,
        "text_config": {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("sliding_attention", "full_attention")
            },
        },
    },
}
