"""Settings of single types that the rules of ``shrinking`` do not find."""

from typing import Any

from tools.zoo.shrinking import EXPERTS, HEAD_DIM, HEADS
from tools.zoo.special_image_text import IMAGE_TEXT
from tools.zoo.special_images import IMAGES, IMAGES_FOR_TASK

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

SPECIAL: dict[str, dict[str, Any]] = {
    **IMAGES,
    **IMAGE_TEXT,
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16, "upsample_initial_channel": 64}},
    "lilt": {"hidden_size": 96},
    "patchtst": {"num_targets": 3},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "dia": {"decoder_config": {"cross_hidden_size": 64}},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64, "num_filters": 16}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "wav2vec2-bert": {"vocab_size": 128},
    "wav2vec2-conformer": {"vocab_size": 128},
    "moonshine": {"pad_token_id": 0},
    "speech-encoder-decoder": {"pad_token_id": 0},
    "albert": {"num_hidden_groups": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"use_cache": False},
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "cpmant": {"init_std": 0.02},
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
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": 2},
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
    "hrm_text": {"H_cycles": 1, "L_cycles": 1},
    "rwkv": {"rescale_every": 0},
    "encoder-decoder": {"pad_token_id": 0},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 2},
    "vibevoice_asr": {
        name: {"num_filters": 4, "depths": [1] * 7}
        for name in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "mode": "train", "use_cache": False},
    "xmod": {"default_language": "en_XX"},
    "mllama": {"text_config": {"num_hidden_layers": 5, "cross_attention_layers": [3]}},
    "mobilebert": {"embedding_size": 16},
    "perceiver": {"image_size": 16, "num_blocks": 1, "num_latents": 16, "num_self_attends_per_block": 4},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}

SPECIAL_FOR_TASK: dict[tuple[str, str], dict[str, Any]] = {
    ("masked-lm", "reformer"): {"is_decoder": False},
    **IMAGES_FOR_TASK,
}

# Arguments of ``NxDPPModel`` that a type needs: its layers, if it declares fewer than four; its inputs, if it takes
# more than tokens.
ARGUMENTS: dict[str, dict[str, list[str]]] = {
    "albert": {"transformer_layer_cls": ["AlbertLayerGroup"]},
    "bit": {"transformer_layer_cls": ["BitStage"]},
    "cpmant": {"transformer_layer_cls": ["CpmAntTransformerBlock"]},
    "ctrl": {"transformer_layer_cls": ["EncoderLayer"]},
    "fastspeech2_conformer": {"transformer_layer_cls": ["FastSpeech2ConformerEncoderLayer"]},
    "fastspeech2_conformer_with_hifigan": {"transformer_layer_cls": ["FastSpeech2ConformerEncoderLayer"]},
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
    "cpmant": "init_std=0.02: by default 1.0, where one rounding becomes a difference of 1e-5 in four steps",
    "hrm_text": "H_cycles=1, L_cycles=1, each layer once",
    "rwkv": "rescale_every=0: otherwise eval mode changes weights in place, which is refused",
    "perceiver": "num_blocks=1, each layer once",
}

_DRAFTS = "drafts from another model's hidden states and key-value states, takes no labels"
_TIMM = "needs the timm package"
_NO_TRAINING = "its forward raises for labels, and returns keypoints that the data select"
_CODES = "its inputs, text with codes or latents of sound at the places of special tokens, are not made here"
_GREEDY = "its forward takes no labels: each step reads the symbol that the step before predicted best"

# Types that cannot be built or trained alone, with the reason.
_NO_LABELS = "its forward takes no labels"
_RAISES = "does not support training: its forward raises for labels"
_PP_OCR = ("v5_mobile", "v5_server", "v6_medium", "v6_small")
CANNOT_TRAIN: dict[tuple[str, str], str] = {
    ("causal-lm", "gemma3n"): _TIMM + " for its vision tower (gemma3n_text runs)",
    ("causal-lm", "gemma4_assistant"): _DRAFTS,
    ("causal-lm", "gemma4_unified_assistant"): _DRAFTS,
    ("image-classification", "dinat"): "needs the natten package of kernels",
    ("image-classification", "pp_lcnet"): _NO_LABELS,
    ("image-classification", "shieldgemma2"): "its forward passes labels on but returns probabilities and no loss",
    ("image-classification", "timm_wrapper"): _TIMM,
    ("keypoint-detection", "superpoint"): _NO_TRAINING,
    ("keypoint-matching", "efficientloftr"): _NO_TRAINING,
    ("keypoint-matching", "lightglue"): _NO_TRAINING,
    ("keypoint-matching", "superglue"): _NO_TRAINING,
    ("mask-generation", "edgetam_video"): "its model is that of edgetam",
    ("mask-generation", "sam2_video"): "its model is that of sam2",
    ("mask-generation", "sam3_video"): "its model is that of sam3_tracker",
    ("table-recognition", "slanet"): _GREEDY,
    ("table-recognition", "slanext"): _GREEDY,
    ("text-to-waveform", "csm"): _CODES,
    ("text-to-waveform", "gradium_phonon_tts"): _CODES,
    ("text-to-waveform", "higgs_audio_v2"): _CODES,
    ("text-to-waveform", "pocket_tts"): _CODES,
    ("text-to-waveform", "bark"): "its model has no forward: generation joins four models",
    ("text-to-waveform", "vits"): "its forward raises for labels: training is not supported",
    **{("object-detection", f"pp_doclayout_v{version}"): _RAISES for version in (2, 3, 4)},
    **{("object-detection", f"pp_ocr{name}_det"): _NO_LABELS for name in _PP_OCR},
    ("universal-segmentation", "videomt"): _RAISES,
}
