"""Values of the graph that are not tensors: shapes, sizes, dtypes, devices, and numbers computed from them."""

import math
import operator
from typing import Any

import torch
from torch import fx

LIKE = frozenset({torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like})
"""Functions that make a tensor from the metadata of another."""

_ATTRIBUTES = frozenset(
    {"device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse",
     "is_xpu", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"}
)  # fmt: skip
_METHODS = frozenset(
    {"dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_signed", "ndimension",
     "nelement", "numel", "size", "storage_offset", "stride"}
)  # fmt: skip
_FUNCTIONS = frozenset(
    {torch.broadcast_shapes, torch.finfo, torch.iinfo, torch.is_complex, torch.is_floating_point, torch.numel}
)


# Attributes and methods of shapes, numbers, texts, dtypes and devices.
_NAMES = frozenset(
    name
    for value in (torch.Size(), 1, 1.0, "", torch.float32, torch.device("cpu"), torch.finfo(), torch.iinfo(torch.int8))
    for name in dir(value)
)


def has_name(node: fx.Node, name: str) -> bool:
    """Return whether the value of ``node`` may have an attribute ``name``. NumPy looks for some that none has."""
    return not name.startswith("__array_") and (name in _NAMES or not is_metadata(node))


def is_metadata(node: fx.Node) -> bool:
    """Return whether ``node`` is surely no tensor: it tells shape, dtype or device of one, or follows from these."""
    known = node.meta.get("is_metadata")
    if known is None:
        known = node.meta["is_metadata"] = _is_metadata(node)
    return bool(known)


def _is_metadata(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    if node.op == "placeholder":
        return spec is not None and spec.number is not None
    if node.op == "call_method":
        return node.target in _METHODS or _follows(node)
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target is getattr and node.args[1] in _ATTRIBUTES:
        return True
    if target in _FUNCTIONS:
        return True
    arithmetic = getattr(target, "__module__", "") in (operator.__name__, "_operator", math.__name__)
    return (arithmetic or target is getattr) and _follows(node)


def is_shape(node: fx.Node) -> bool:
    """Return whether ``node`` reads the shape of a tensor."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.op == "call_function" and node.target is getattr and node.args[1] == "shape"


def _follows(node: fx.Node) -> bool:
    arguments = node.all_input_nodes
    return bool(arguments) and all(is_metadata(argument) for argument in arguments)
