"""Schemas that torchvision's Python code needs where its compiled operators do not load.

The wheels of the registry are for CUDA. Beside a torch for the CPU their operators are missing, and
``import torchvision`` fails when it registers shapes for two of them. No model of the zoo calls them.
"""

import importlib.util

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None


def define_missing_operators() -> None:
    """Let ``import torchvision`` succeed. Do nothing without torchvision, or if its operators load."""
    global _library
    found = importlib.util.find_spec("torchvision")
    if found is None or _library is not None or found.origin is None:
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _library.define(name + _SCHEMA)
