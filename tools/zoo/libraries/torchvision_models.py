"""torchvision: image classifiers, and a segmenter."""

from functools import partial
from typing import Any

import torchvision
from torch import nn

from tools.zoo.libraries.case import CLASSES, Case, Classified, images


def _build(name: str, settings: dict[str, Any]) -> nn.Module:
    model = getattr(torchvision.models, name)
    return Classified(model(weights=None, num_classes=CLASSES, **settings))


def _case(name: str, layers: str | list[str], side: int = 64, **settings: Any) -> Case:
    return Case(partial(_build, name, settings), images(side), layers)


_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 4, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
_SWIN = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
CASES = {
    "VisionTransformer": Case(
        lambda: Classified(torchvision.models.VisionTransformer(num_classes=CLASSES, **_VIT)),
        images(32),
        "EncoderBlock",
    ),
    "SwinTransformer": Case(
        lambda: Classified(torchvision.models.SwinTransformer(num_classes=CLASSES, **_SWIN)),
        images(32),
        "SwinTransformerBlock",
    ),
    "resnet18": _case("resnet18", "BasicBlock"),
    "resnet50": _case("resnet50", "Bottleneck"),
    "convnext_tiny": _case("convnext_tiny", "CNBlock"),
    "efficientnet_b0": _case("efficientnet_b0", "MBConv"),
    "mobilenet_v2": _case("mobilenet_v2", "InvertedResidual"),
    "mobilenet_v3_small": _case("mobilenet_v3_small", "InvertedResidual"),
    "regnet_y_400mf": _case("regnet_y_400mf", "ResBottleneckBlock"),
    "densenet121": _case("densenet121", "_DenseBlock"),
    "shufflenet_v2_x0_5": _case("shufflenet_v2_x0_5", "InvertedResidual"),
    "squeezenet1_1": _case("squeezenet1_1", "Fire"),
    "mnasnet0_5": _case("mnasnet0_5", "_InvertedResidual"),
    "maxvit_t": Case(
        lambda: Classified(
            torchvision.models.MaxVit((64, 64), 16, 2, [16, 16, 32, 32], [1, 1, 1, 1], 16, 0.0, num_classes=CLASSES)
        ),
        images(64),
        "MaxVitBlock",
    ),
}
