"""Settings of single types that the rules of ``shrinking`` do not find."""

from typing import Any

from tests.zoo.shrinking import EXPERTS, HEAD_DIM, HEADS

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
_INDEXER = {
    "head_dim": HEAD_DIM,
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_GEMMA4 = {"global_head_dim": 2 * HEAD_DIM}
_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_DOTS3_NOTE = {
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": HEAD_DIM + HEAD_DIM // 2,
    "swa_qk_nope_head_dim": HEAD_DIM,
    "swa_v_head_dim": HEAD_DIM,
    "head_dim": HEAD_DIM + HEAD_DIM // 2,
    "num_hidden_layers": 4,
}

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_DETR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 8}
_ONE_MAP = _DETR | {"backbone_config": _RESNET | {"out_features": ["stage4"]}}
_THREE_MAPS = _DETR | {"backbone_config": _RESNET | {"out_features": ["stage2", "stage3", "stage4"]}}

# An encoder of four layers with a map after each, for necks of four maps.
_DINOV2 = {
    "model_type": "dinov2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
    "apply_layernorm": True,
}
_FOUR_MAPS = {"neck_hidden_sizes": [16, 32, 48, 64], "fusion_hidden_size": 32}

SPECIAL: dict[str, dict[str, Any]] = {
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], **_FOUR_MAPS},
    "depth_anything": {"backbone_config": _DINOV2, "reassemble_hidden_size": 64, "patch_size": 8, **_FOUR_MAPS},
    # Otherwise positions are scaled at random in training.
    "dinov3_vit": {"pos_embed_rescale": None},
    "lilt": {"hidden_size": 96},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "wav2vec2-bert": {"vocab_size": 128},
    "wav2vec2-conformer": {"vocab_size": 128},
    "moonshine": {"pad_token_id": 0},
    "speech-encoder-decoder": {"pad_token_id": 0},
    "detr": _ONE_MAP,
    "conditional_detr": _ONE_MAP,
    "dab-detr": _ONE_MAP,
    "table-transformer": _ONE_MAP,
    "deformable_detr": _THREE_MAPS,
    "albert": {"num_hidden_groups": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"use_cache": False},
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": _DOTS3_NOTE},
    "dots3_note_text": _DOTS3_NOTE,
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": 128},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": {"text_config": _GEMMA4 | _NO_LAYER_INPUTS},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_assistant": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": HEAD_DIM // 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": 64},
    "mimo_v2_flash": {"head_dim": HEAD_DIM + HEAD_DIM // 2},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bit": {"num_groups": 8},
    "hrm_text": {"H_cycles": 1, "L_cycles": 1},
    "rwkv": {"rescale_every": 0},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "encoder-decoder": {"pad_token_id": 0},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 2},
    "levit": {"patch_size": 16},
    "vibevoice_asr": {
        name: {"num_filters": 4, "depths": [1] * 7}
        for name in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "mode": "train", "use_cache": False},
    "xmod": {"default_language": "en_XX"},
    "cvt": {"depth": (1, 2, 3), "embed_dim": (16, 48, 96)},
    "donut-swin": {"window_size": 2},
    "swin": {"window_size": 2},
    "swinv2": {"window_size": 2},
    "hgnet_v2": {
        "stem_channels": (3, 16, 16),
        "stage_in_channels": (16, 32, 64, 96),
        "stage_mid_channels": (8, 16, 24, 32),
        "stage_out_channels": (32, 64, 96, 128),
        "hidden_sizes": (32, 64, 96, 128),
        "stage_num_blocks": (1, 1, 1, 1),
        "stage_numb_of_layers": (2, 2, 2, 2),
    },
    "mllama": {"text_config": {"num_hidden_layers": 5, "cross_attention_layers": [3]}},
    "mobilebert": {"embedding_size": 16},
    "perceiver": {"image_size": 16, "num_blocks": 1, "num_latents": 16, "num_self_attends_per_block": 4},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "textnet": {"stem_out_channels": 16},
}

SPECIAL_FOR_TASK: dict[tuple[str, str], dict[str, Any]] = {
    ("masked-lm", "reformer"): {"is_decoder": False},
    ("semantic-segmentation", "beit"): {"out_indices": [1, 2, 3, 4]},
}

# Arguments of ``NxDPPModel`` that a type needs: its layers, if it declares fewer than four; its inputs, if it takes
# more than tokens.
ARGUMENTS: dict[str, dict[str, list[str]]] = {
    "albert": {"transformer_layer_cls": ["AlbertLayerGroup"]},
    "bit": {"transformer_layer_cls": ["BitStage"]},
    "cpmant": {"transformer_layer_cls": ["CpmAntTransformerBlock"]},
    "ctrl": {"transformer_layer_cls": ["EncoderLayer"]},
    "flaubert": {"transformer_layer_cls": ["TransformerFFN"]},
    "fsmt": {"transformer_layer_cls": ["EncoderLayer", "DecoderLayer"]},
    "funnel": {"transformer_layer_cls": ["FunnelLayer"]},
    "git": {"input_names": ["input_ids", "pixel_values", "labels"]},
    "ibert": {"transformer_layer_cls": ["IBertLayer"]},
    "mobilenet_v1": {"transformer_layer_cls": ["MobileNetV1ConvLayer"]},
    "mobilenet_v2": {"transformer_layer_cls": ["MobileNetV2InvertedResidual"]},
    "mobilevit": {"transformer_layer_cls": ["MobileViTMobileNetLayer", "MobileViTLayer"]},
    "mobilevitv2": {"transformer_layer_cls": ["MobileViTV2MobileNetLayer", "MobileViTV2Layer"]},
    "mpnet": {"transformer_layer_cls": ["MPNetLayer"]},
    "openai-gpt": {"transformer_layer_cls": ["Block"]},
    "perceiver": {"transformer_layer_cls": ["PerceiverLayer"]},
    "pvt": {"transformer_layer_cls": ["PvtLayer"]},
    "reformer": {"transformer_layer_cls": ["ReformerLayer"]},
    "squeezebert": {"transformer_layer_cls": ["SqueezeBertModule"]},
    "textnet": {"transformer_layer_cls": ["TextNetStage"]},
    "voxtral_realtime": {"input_names": ["input_ids", "input_features", "labels"]},
    "xlm": {"transformer_layer_cls": ["TransformerFFN"]},
    "xlnet": {"transformer_layer_cls": ["XLNetLayer"]},
}

# Types that keep computed tensors in eval mode. A second backward fails there.
NO_GRADIENT_IN_EVAL = {"levit"}

# Notes on the page for types with another configuration or comparison.
NOTES = {
    "levit": "eval mode: the loss alone, because the second backward of the unwrapped model fails",
    "albert": "num_hidden_groups=4, a group for each layer",
    "big_bird": "attention_type='original_full': a first short input would replace modules, which is refused",
    "bigbird_pegasus": "attention_type='original_full', as big_bird",
    "hrm_text": "H_cycles=1, L_cycles=1, each layer once",
    "rwkv": "rescale_every=0: otherwise eval mode changes weights in place, which is refused",
    "perceiver": "num_blocks=1, each layer once",
}

_DRAFTS = "drafts from another model's hidden states and key-value states, takes no labels"
_TIMM = "needs the timm package"

# Types that cannot be built or trained alone, with the reason.
CANNOT_TRAIN: dict[tuple[str, str], str] = {
    ("causal-lm", "gemma3n"): _TIMM + " for its vision tower (gemma3n_text runs)",
    ("causal-lm", "gemma4_assistant"): _DRAFTS,
    ("causal-lm", "gemma4_unified_assistant"): _DRAFTS,
    ("image-classification", "dinat"): "needs the natten package of kernels",
    ("image-classification", "pp_lcnet"): "its forward takes no labels",
    ("image-classification", "shieldgemma2"): "its forward passes labels on but returns probabilities and no loss",
    ("image-classification", "timm_wrapper"): _TIMM,
}
