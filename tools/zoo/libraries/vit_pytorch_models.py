"""vit-pytorch: its vision transformers, whose layers are pairs in a list."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from vit_pytorch import (
    ViT,
    cait,
    cct,
    cross_vit,
    cvt,
    deepvit,
    levit,
    local_vit,
    max_vit,
    mobile_vit,
    nest,
    parallel_vit,
    pit,
    regionvit,
    scalable_vit,
    sep_vit,
    simple_vit,
    simple_vit_with_qk_norm,
    simple_vit_with_register_tokens,
    simple_vit_with_value_residual,
    t2t,
    twins_svt,
    vit_for_small_dataset,
    vit_with_patch_dropout,
    xcit,
)

from tools.zoo.libraries.case import CLASSES, Case, Classified, images

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES, "dim": 32, "depth": 4, "heads": 2, "mlp_dim": 64}


def _build(model: Callable[..., nn.Module], settings: dict[str, Any]) -> nn.Module:
    return Classified(model(**settings))


def _case(model: Callable[..., nn.Module], settings: dict[str, Any], layers: Any, side: int = 32) -> Case:
    return Case(partial(_build, model, settings), images(side), layers)


_PAIR = ["Attention", "FeedForward"]
CASES = {
    "ViT": _case(ViT, _VIT, _PAIR),
    "SimpleViT": _case(simple_vit.SimpleViT, _VIT, _PAIR),
    "SimpleViT with registers": _case(simple_vit_with_register_tokens.SimpleViT, _VIT, _PAIR),
    "SimpleViT with query-key norm": _case(simple_vit_with_qk_norm.SimpleViT, _VIT, _PAIR),
    "SimpleViT with value residual": _case(simple_vit_with_value_residual.SimpleViT, _VIT, "Attention"),
    "ViT with patch dropout": _case(vit_with_patch_dropout.ViT, _VIT | {"patch_dropout": 0.0}, _PAIR),
    "ViT for small datasets": _case(vit_for_small_dataset.ViT, _VIT, ["LSA", "FeedForward"]),
    "DeepViT": _case(deepvit.DeepViT, _VIT, _PAIR),
    "CaiT": _case(cait.CaiT, {**_VIT, "cls_depth": 2}, _PAIR),
    "parallel ViT": _case(parallel_vit.ViT, _VIT, "Parallel"),
    "local ViT": _case(local_vit.LocalViT, _VIT, ["Residual", "ExcludeCLS"]),
    "XCiT": _case(
        xcit.XCiT,
        {**_VIT, "cls_depth": 2, "local_patch_kernel_size": 3},
        ["XCAttention", "LocalPatchInteraction", "FeedForward"],
    ),
    "CCT": _case(
        cct.CCT,
        {
            "img_size": 32,
            "embedding_dim": 32,
            "n_conv_layers": 1,
            "num_layers": 4,
            "num_heads": 2,
            "mlp_ratio": 2.0,
            "num_classes": CLASSES,
        },
        "TransformerEncoderLayer",
    ),
    "T2T": _case(
        t2t.T2TViT,
        {
            "image_size": 32,
            "dim": 32,
            "depth": 4,
            "heads": 2,
            "mlp_dim": 64,
            "num_classes": CLASSES,
            "t2t_layers": ((3, 2), (3, 2)),
        },
        _PAIR,
    ),
    "PiT": _case(
        pit.PiT,
        {
            "image_size": 32,
            "patch_size": 8,
            "dim": 32,
            "num_classes": CLASSES,
            "depth": (2, 2),
            "heads": 2,
            "mlp_dim": 64,
        },
        _PAIR,
    ),
    "LeViT": _case(
        levit.LeViT,
        {
            "image_size": 64,
            "num_classes": CLASSES,
            "dim": (16, 16, 32),
            "depth": (1, 2, 1),
            "heads": (2, 2, 2),
            "mlp_mult": 2,
            "stages": 3,
        },
        _PAIR,
        64,
    ),
    "CvT": _case(
        cvt.CvT,
        {
            "num_classes": CLASSES,
            "s1_emb_dim": 16,
            "s2_emb_dim": 16,
            "s3_emb_dim": 32,
            "s3_depth": 2,
            "s3_heads": 2,
            "s2_heads": 2,
        },
        _PAIR,
        64,
    ),
    "Twins": _case(
        twins_svt.TwinsSVT,
        {
            "num_classes": CLASSES,
            "s1_emb_dim": 16,
            "s2_emb_dim": 16,
            "s3_emb_dim": 16,
            "s4_emb_dim": 32,
            "s1_local_patch_size": 4,
            "s2_local_patch_size": 2,
            "s3_local_patch_size": 1,
            "s4_local_patch_size": 1,
            "s1_global_k": 4,
            "s2_global_k": 2,
            "s3_global_k": 1,
            "s4_global_k": 1,
            "s3_depth": 2,
        },
        ["LocalAttention", "GlobalAttention", "FeedForward"],
        64,
    ),
    "RegionViT": _case(
        regionvit.RegionViT,
        {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": CLASSES},
        "R2LTransformer",
        64,
    ),
    "CrossViT": _case(
        cross_vit.CrossViT,
        {
            "image_size": 32,
            "num_classes": CLASSES,
            "depth": 4,
            "sm_dim": 16,
            "lg_dim": 32,
            "sm_patch_size": 4,
            "lg_patch_size": 8,
            "sm_enc_depth": 1,
            "lg_enc_depth": 1,
        },
        ["Transformer", "CrossTransformer"],
    ),
    "NesT": _case(
        nest.NesT,
        {
            "image_size": 32,
            "patch_size": 4,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (2, 2),
            "num_classes": CLASSES,
        },
        _PAIR,
    ),
    "ScalableViT": _case(
        scalable_vit.ScalableViT,
        {
            "num_classes": CLASSES,
            "dim": 16,
            "heads": (1, 1, 2, 2),
            "depth": (1, 1, 2, 1),
            "ssa_dim_key": (8, 8, 8, 8),
            "reduction_factor": (2, 1, 1, 1),
            "window_size": (2, 1, None, None),
        },
        "Transformer",
        64,
    ),
    "SepViT": _case(
        sep_vit.SepViT,
        {
            "num_classes": CLASSES,
            "dim": 16,
            "dim_head": 8,
            "heads": (1, 1, 2, 2),
            "depth": (1, 1, 2, 1),
            "window_size": 2,
        },
        "Transformer",
        128,
    ),
    "MaxViT": _case(
        max_vit.MaxViT,
        {
            "num_classes": CLASSES,
            "dim": 16,
            "dim_head": 8,
            "depth": (1, 1, 1, 1),
            "window_size": 2,
            "dim_conv_stem": 16,
        },
        "Sequential",
        64,
    ),
    "MobileViT": _case(
        mobile_vit.MobileViT,
        {"image_size": (64, 64), "dims": [16, 16, 16], "channels": [8] * 10 + [16], "num_classes": CLASSES},
        ["MV2Block", "MobileViTBlock"],
        64,
    ),
}
