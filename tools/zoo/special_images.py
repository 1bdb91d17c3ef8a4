"""Settings of detectors, segmenters and estimators of depth, whose backbones and necks must fit."""

from typing import Any

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_DETR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 8}
_LAST_STAGES = ["stage2", "stage3", "stage4"]
_ONE_MAP = _DETR | {"backbone_config": _RESNET | {"out_features": ["stage4"]}}
_THREE_MAPS = _DETR | {"backbone_config": _RESNET | {"out_features": _LAST_STAGES}}

HGNET_V2: dict[str, Any] = {
    "stem_channels": (3, 16, 16),
    "stage_in_channels": (16, 32, 64, 96),
    "stage_mid_channels": (8, 16, 24, 32),
    "stage_out_channels": (32, 64, 96, 128),
    "hidden_sizes": (32, 64, 96, 128),
    "stage_num_blocks": (1, 1, 1, 1),
    "stage_numb_of_layers": (2, 2, 2, 2),
}
# No denoising: it draws random boxes in training.
_RT_DETR = {
    "num_queries": 8,
    "num_denoising": 0,
    "encoder_hidden_dim": 64,
    "decoder_in_channels": [64, 64, 64],
}
_RT_DETR_RESNET = _RESNET | {"model_type": "rt_detr_resnet", "out_features": _LAST_STAGES}
_RT_DETR_OF_RESNET = _RT_DETR | {"encoder_in_channels": [16, 32, 32], "backbone_config": _RT_DETR_RESNET}
_RT_DETR_OF_HGNET = _RT_DETR | {
    "encoder_in_channels": [64, 96, 128],
    "backbone_config": {"model_type": "hgnet_v2", "out_features": _LAST_STAGES, **HGNET_V2},
}

# An encoder of four layers with a map after each, for necks of four maps.
_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
}
_DINOV2 = _VIT | {"model_type": "dinov2", "apply_layernorm": True}
_FOUR_MAPS = {"neck_hidden_sizes": [16, 32, 48, 64], "fusion_hidden_size": 32}
_SWIN = {
    "model_type": "swin",
    "embed_dim": 16,
    "depths": [2, 2, 2, 2],
    "num_heads": [2, 2, 2, 2],
    "window_size": 2,
    "image_size": 64,
    "drop_path_rate": 0.0,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}

# Masks from points: the maps of an image of 64 pixels.
_SAM: dict[str, dict[str, Any]] = {
    "vision_config": {"output_channels": 64, "num_pos_feats": 32, "window_size": 4, "global_attn_indexes": [1, 3]},
    "prompt_encoder_config": {"patch_size": 8},
}
_HIERA = {
    "model_type": "sam2_hiera_det_model",
    "hidden_size": 16,
    "embed_dim_per_stage": [16, 32, 64, 128],
    "blocks_per_stage": [1, 2, 2, 1],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [4, 4, 4, 2],
    "global_attention_blocks": [2, 4],
    "image_size": [64, 64],
}
_MAPS_OF_SAM2 = {"fpn_hidden_size": 64, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
_SAM2 = {
    "vision_config": {"backbone_config": _HIERA, "backbone_channel_list": [128, 64, 32, 16], **_MAPS_OF_SAM2},
    "prompt_encoder_config": {"patch_size": 16},
}

IMAGES: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 8},
    "chmv2": {
        "backbone_config": _VIT
        | {
            "model_type": "dinov3_vit",
            "reshape_hidden_states": True,
            "pos_embed_rescale": None,
            "return_class_token": True,
        },
        "patch_size": 8,
        "fusion_hidden_size": 32,
        "post_process_channels": [16, 32, 48, 64],
        "number_output_channels": 16,
    },
    "conditional_detr": _ONE_MAP,
    "convnext": {"hidden_sizes": [16, 16, 32, 32]},
    "convnextv2": {"hidden_sizes": [16, 16, 32, 32]},
    "cvt": {"depth": (1, 2, 3), "embed_dim": (16, 48, 96)},
    "d_fine": _RT_DETR_OF_HGNET | {"eval_idx": -1},
    "dab-detr": _ONE_MAP,
    "deformable_detr": _THREE_MAPS,
    "deimv2": _RT_DETR_OF_HGNET,
    "depth_anything": {"backbone_config": _DINOV2, "reassemble_hidden_size": 64, "patch_size": 8, **_FOUR_MAPS},
    "depth_pro": {
        "patch_size": 64,
        "intermediate_hook_ids": [3, 1],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [32, 32, 16],
        "fusion_hidden_size": 32,
    },
    "detr": _ONE_MAP,
    # Otherwise positions are scaled at random in training.
    "dinov3_vit": {"pos_embed_rescale": None},
    "donut-swin": {"window_size": 2},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], **_FOUR_MAPS},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "focalnet": {"hidden_sizes": [16, 32, 64, 128], "embed_dim": 16},
    "hgnet_v2": HGNET_V2,
    "levit": {"patch_size": 16},
    "lw_detr": {
        "num_queries": 8,
        "group_detr": 2,
        "projector_scale_factors": [1.0],
        "projector_in_channels": [64, 64],
        "backbone_config": {
            "model_type": "lw_detr_vit",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "image_size": 64,
            "pretrain_image_size": 64,
            "patch_size": 8,
            "num_windows": 4,
            "window_block_indices": [0, 2],
            "out_indices": [2, 4],
        },
    },
    "mask2former": {
        "backbone_config": _SWIN,
        "feature_size": 64,
        "mask_feature_size": 64,
        "hidden_dim": 64,
        "num_queries": 8,
        "encoder_feedforward_dim": 64,
        "dim_feedforward": 64,
        "train_num_points": 32,
    },
    "oneformer": {
        "backbone_config": _SWIN,
        "conv_dim": 64,
        "mask_dim": 64,
        "hidden_dim": 64,
        "num_queries": 8,
        "encoder_feedforward_dim": 64,
        "dim_feedforward": 64,
        "train_num_points": 32,
        "text_encoder_width": 64,
        "text_encoder_num_layers": 2,
        "text_encoder_context_length": 8,
        "text_encoder_n_ctx": 2,
        "task_seq_len": 8,
        "is_training": True,
    },
    "prompt_depth_anything": {
        "backbone_config": _DINOV2,
        "reassemble_hidden_size": 64,
        "patch_size": 8,
        **_FOUR_MAPS,
    },
    "pp_ocrv5_mobile_rec": {"head_out_channels": 32},
    "pp_ocrv5_server_rec": {"head_out_channels": 32},
    "pp_ocrv6_small_rec": {"head_out_channels": 32},
    "pp_ocrv6_tiny_rec": {"head_out_channels": 32},
    "rf_detr": {"num_queries": 4, "group_detr": 2},
    "rt_detr": _RT_DETR_OF_RESNET,
    "rt_detr_v2": _RT_DETR_OF_RESNET,
    "pp_doclayout_v2": _RT_DETR_OF_HGNET | {"class_thresholds": [0.5, 0.5], "class_order": [0, 1]},
    "sam": _SAM,
    "sam2": _SAM2,
    "sam_hq": _SAM | {"mask_decoder_config": {"vit_dim": 64}},
    "sam3_tracker": {"vision_config": _MAPS_OF_SAM2 | {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}},
    "edgetam": {"vision_config": _MAPS_OF_SAM2, "prompt_encoder_config": {"patch_size": 16}},
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16, 16],
            "upsample_kernel_sizes": [4, 4],
            "conv_out_channels": [16],
            "conv_kernel_sizes": [1],
        },
        "num_key_value_heads_per_layer": [4, 4, 4, 4],
        "pos_embed_rescale": None,
    },
    "swin": {"window_size": 2},
    "swinv2": {"window_size": 2},
    "table-transformer": _ONE_MAP,
    "textnet": {"stem_out_channels": 16},
    "tipsv2_dpt": {"backbone_config": _VIT | {"model_type": "tipsv2_vision_model"}, **_FOUR_MAPS},
    "upernet": {"backbone_config": _RESNET | {"out_features": ["stage1", *_LAST_STAGES]}, "auxiliary_in_channels": 32},
    "vit": {"encoder_stride": 8},
    "vitmatte": {
        "backbone_config": {
            "model_type": "vitdet",
            "num_channels": 4,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": 16,
            "window_block_indices": [0, 2],
            "residual_block_indices": [1, 3],
        },
        "convstream_hidden_sizes": [16, 32, 64],
        "fusion_hidden_sizes": [32, 16, 16, 8],
    },
    "deit": {"encoder_stride": 8},
    "zoedepth": {
        "backbone_config": _VIT | {"model_type": "beit"},
        "bottleneck_features": 32,
        "num_relative_features": 16,
        "bin_embedding_dim": 16,
        "num_attractors": [4, 4, 4, 4],
        **_FOUR_MAPS,
    },
}

IMAGES_FOR_TASK: dict[tuple[str, str], dict[str, Any]] = {
    ("image-matting", "sapiens2"): {"num_labels": 4},
    ("semantic-segmentation", "beit"): {"out_indices": [1, 2, 3, 4]},
    ("semantic-segmentation", "data2vec-vision"): {"out_indices": [1, 2, 3, 4]},
    ("universal-segmentation", "detr"): {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
}
