"""timm: image classifiers, with four or more small blocks."""

from functools import partial
from typing import Any

import timm
from timm.models import mlp_mixer
from torch import nn

from tools.zoo.libraries.case import CLASSES, Case, Classified, images

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
_MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 4}
_STAGED = {"depths": (1, 1, 2, 1), "dims": (16, 16, 32, 32)}


def _build(name: str, settings: dict[str, Any]) -> nn.Module:
    return Classified(timm.create_model(name, num_classes=CLASSES, **settings))


def _case(name: str, layer: str | list[str], side: int = 32, **settings: Any) -> Case:
    return Case(partial(_build, name, settings), images(side), layer)


def _make(name: str, settings: dict[str, Any]) -> nn.Module:
    return Classified(getattr(timm.models, name)(num_classes=CLASSES, **settings))


def _made(name: str, layer: str | list[str], side: int = 32, **settings: Any) -> Case:
    return Case(partial(_make, name, settings), images(side), layer)


CASES = {
    "vit": _case("vit_tiny_patch16_224", "Block", **_VIT),
    "vit dynamic_img_size": _case("vit_tiny_patch16_224", "Block", **_VIT, dynamic_img_size=True),
    "vit with registers": _case("vit_small_patch14_reg4_dinov2", "Block", **_VIT),
    "vit average pooling": _case("vit_tiny_patch16_224", "Block", **_VIT, global_pool="avg", class_token=False),
    "vit map pooling": _case("vit_tiny_patch16_224", "Block", **_VIT, global_pool="map", class_token=False),
    "naflexvit": _case("naflexvit_base_patch16_gap", "Block", patch_size=8, embed_dim=32, depth=4, num_heads=2),
    "deit distilled": _case("deit_tiny_distilled_patch16_224", "Block", **_VIT),
    "deit3": _case("deit3_small_patch16_224", "Block", **_VIT),
    "beit": _case("beit_base_patch16_224", "Block", **_VIT),
    "eva02": _case("eva02_tiny_patch14_224", "EvaBlock", **_VIT),
    "cait": _case("cait_xxs24_224", ["LayerScaleBlock"], **_VIT),
    "xcit": _case("xcit_nano_12_p8_224", "XCABlock", img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2),
    "swin": _case(
        "swin_tiny_patch4_window7_224",
        "SwinTransformerBlock",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    "swinv2": _case(
        "swinv2_tiny_window8_256",
        "SwinTransformerV2Block",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    "swinv2 cr": _case(
        "swinv2_cr_tiny_224",
        "SwinTransformerV2CrBlock",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    "davit": _case(
        "davit_tiny", ["SpatialBlock", "ChannelBlock"], depths=(1, 1, 2, 1), embed_dims=(16,) * 4, num_heads=(2,) * 4
    ),
    "twins": _case(
        "twins_svt_small",
        "Block",
        img_size=64,
        embed_dims=(16, 16, 32, 32),
        depths=(1, 1, 2, 1),
        num_heads=(1, 1, 2, 2),
        side=64,
    ),
    "levit": _case("levit_128s", ["AttentionDownsample", "Attention", "LevitMlp"], 64, img_size=64),
    "convnext": _case("convnext_atto", "ConvNeXtBlock", **_STAGED, side=64),
    "convnextv2": _case("convnextv2_atto", "ConvNeXtBlock", **_STAGED, side=64),
    "inception_next": _case(
        "inception_next_atto", "MetaNeXtBlock", depths=(1, 1, 2, 1), dims=(16, 16, 32, 32), side=64
    ),
    "edgenext": _case("edgenext_xx_small", ["ConvBlock", "SplitTransposeBlock"], depths=(1, 1, 2, 1), side=64),
    "fastvit": _case("fastvit_t8", "RepMixerBlock", 64, layers=(1, 1, 2, 1), embed_dims=(16, 16, 32, 32)),
    "repvit": _case("repvit_m0_9", "RepViTBlock", 64, embed_dim=(16, 16, 32, 32), depth=(1, 1, 2, 1)),
    "hiera": _case("hiera_tiny_224", "HieraBlock", img_size=64, embed_dim=16, stages=(1, 1, 2, 1), side=64),
    "efficientformer": _case(
        "efficientformer_l1", ["MetaBlock1d", "MetaBlock2d"], 224, depths=(1, 1, 1, 2), embed_dims=(8, 16, 16, 32)
    ),
    "sequencer": _case(
        "sequencer2d_s", "Sequencer2dBlock", 64, layers=(1, 1, 2, 1), embed_dims=(16,) * 4, hidden_sizes=(8,) * 4
    ),
    "mambaout": _case("mambaout_femto", "GatedConvBlock", 64, depths=(1, 1, 2, 1), dims=(16, 16, 32, 32)),
    "resnet": _case("resnet18", "BasicBlock", 64, layers=(1, 1, 2, 1), channels=(8, 8, 16, 16)),
    "resnet50": _case("resnet50", "Bottleneck", 64, layers=(1, 1, 2, 1), channels=(8, 8, 16, 16)),
    "seresnet": _case("seresnet18", "BasicBlock", 64, layers=(1, 1, 2, 1), channels=(8, 8, 16, 16)),
    "resnetv2": _case("resnetv2_18", "PreActBasic", 64, layers=(1, 1, 2, 1), channels=(8, 8, 16, 16)),
    "regnet": _case("regnetx_002", "Bottleneck", 64),
    "densenet": _case("densenet121", "DenseLayer", 64, block_config=(2, 2, 2), growth_rate=8),
    "efficientnet": _case("efficientnet_lite0", ["DepthwiseSeparableConv", "InvertedResidual"], 64),
    "mobilenetv3": _case("mobilenetv3_small_050", ["DepthwiseSeparableConv", "InvertedResidual"], 64),
    "mobilenetv4": _case("mobilenetv4_conv_small_035", ["UniversalInvertedResidual", "ConvBnAct"], 64),
    "visformer": _case("visformer_tiny", "Block", img_size=64, embed_dim=32, depth=(1, 2, 1), num_heads=2, side=64),
    "crossvit": _case(
        "crossvit_tiny_240", "MultiScaleBlock", 240, embed_dim=(16, 32), depth=[[1, 2, 0]] * 3, num_heads=[2, 2]
    ),
    "coat": _case("coat_lite_tiny", "SerialBlock", img_size=64, embed_dims=(16, 16, 32, 32), side=64),
    # The functions of these models fix the arguments that make them small; their classes do not.
    "volo": _made(
        "VOLO",
        ["Outlooker", "Transformer"],
        64,
        img_size=64,
        embed_dims=(32,) * 4,
        layers=(1, 1, 2, 1),
        num_heads=(2,) * 4,
        mlp_ratio=2.0,
    ),
    "mixer": _made("MlpMixer", "MixerBlock", **_MIXER),
    "resmlp": _made("MlpMixer", "ResBlock", **_MIXER, block_layer=mlp_mixer.ResBlock, mlp_ratio=4.0),
    "gmlp": _made(
        "MlpMixer",
        "SpatialGatingBlock",
        **_MIXER,
        block_layer=mlp_mixer.SpatialGatingBlock,
        mlp_ratio=4.0,
        mlp_layer=mlp_mixer.GatedMlp,
    ),
    "convmixer": _made("ConvMixer", "Residual", dim=16, depth=4, kernel_size=3, patch_size=4),
    "pvt_v2": _made("PyramidVisionTransformerV2", "Block", 64, depths=(1, 1, 2, 1), embed_dims=(16, 16, 32, 32)),
    "nest": _made(
        "Nest", "TransformerLayer", 64, img_size=64, embed_dims=(16, 16, 32), num_heads=(1, 1, 2), depths=(1, 1, 2)
    ),
    "poolformer": _made("MetaFormer", "MetaFormerBlock", 64, **_STAGED),
    "focalnet": _made("FocalNet", "FocalNetBlock", 64, depths=(1, 1, 2, 1), embed_dim=16),
    "tiny_vit": _made(
        "TinyVit",
        ["TinyVitBlock", "ConvLayer"],
        64,
        depths=(1, 1, 2, 1),
        embed_dims=(16, 16, 32, 32),
        num_heads=(1, 1, 2, 2),
    ),
}
