"""Values of the graph that are not tensors: shapes, sizes, dtypes, devices, and numbers computed from them.

Fake tensors are on the CPU. A question about a device (``x.is_cuda``, ``x.device.type == "mps"``) is answered for the
device of the model, where the traced value is surely there, and is refused where it may be elsewhere.
"""

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx, nn

from nxdpp.tracing.graph.search import reached
from nxdpp.tracing.modules import listings

LIKE = frozenset({torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like})
"""Functions that make a tensor from the metadata of another."""
NEW = frozenset({"new_empty", "new_full", "new_ones", "new_zeros"})
"""Methods that make a tensor from the metadata of their own."""

_ATTRIBUTES = frozenset(
    {"device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse",
     "is_xpu", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"}
)  # fmt: skip
METHODS = frozenset(
    {"dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_signed", "ndimension",
     "nelement", "numel", "size", "storage_offset", "stride"}
)  # fmt: skip
"""Methods of a tensor that read none of its elements."""

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


def reads(node: Any, names: Collection[str]) -> bool:
    """Return whether ``node`` is one that reads an attribute of one of ``names``."""
    return isinstance(node, fx.Node) and node.target is getattr and node.args[1] in names


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
        return node.target in METHODS or _follows(node)
    if node.op != "call_function":
        return False
    target: Any = node.target
    if reads(node, _ATTRIBUTES) or target in _FUNCTIONS:
        return True
    arithmetic = getattr(target, "__module__", "") in (operator.__name__, operator.add.__module__, math.__name__)
    return (arithmetic or target is getattr) and _follows(node)


def of_values(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose values decide the value of ``node``: not a tensor of which it reads metadata only."""
    arguments = node.all_input_nodes
    if node.op != "placeholder" and is_metadata(node):
        return [argument for argument in arguments if is_metadata(argument)]
    if node.target in LIKE or (node.op == "call_method" and node.target in NEW):
        model = node.args[0] if node.args else node.kwargs.get("input")
        return [argument for argument in arguments if argument is not model or is_metadata(argument)]
    return arguments


def is_shape(node: fx.Node) -> bool:
    """Return whether ``node`` reads the shape of a tensor."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return reads(node, ("shape",))


def _follows(node: fx.Node) -> bool:
    arguments = node.all_input_nodes
    return bool(arguments) and all(is_metadata(argument) for argument in arguments)


_TYPES = {"is_cpu": "cpu", "is_cuda": "cuda", "is_mps": "mps", "is_xpu": "xpu"}
# Methods that may move a tensor.
_MOVES = frozenset({"cpu", "cuda", "mps", "to", "type", "xpu"})


class ElsewhereError(Exception):
    """A tensor whose device is asked may be on another device than the model."""


def device_of_model(module: nn.Module) -> torch.device:
    """The device of the parameters of ``module`` that have values, the CPU without one."""
    devices = (parameter.device for parameter in listings.parameters(module) if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


def asks_for_device(node: fx.Node) -> bool:
    """Return whether ``node`` tells a device, or follows from one and is no tensor."""
    if _reads_device(node):
        return True
    return is_metadata(node) and any(is_metadata(a) and asks_for_device(a) for a in node.all_input_nodes)


def answer_for(node: fx.Node, device: torch.device, other: Callable[[fx.Node], Any]) -> Any:
    """Return the value of ``node``, which asks for a device, on ``device``. Raises ``ElsewhereError``.

    ``other`` gives the value of a node that does not.
    """
    if not asks_for_device(node):
        return other(node)
    if _reads_device(node):
        _refuse_elsewhere(node.args[0])
        if node.op == "call_method":
            return -1 if device.type == "cpu" else device.index or 0
        return device if node.args[1] == "device" else device.type == _TYPES[str(node.args[1])]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: answer_for(argument, device, other))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _reads_device(node: fx.Node) -> bool:
    return reads(node, ("device", *_TYPES)) or (node.op == "call_method" and node.target == "get_device")


def _refuse_elsewhere(value: Any) -> None:
    """Raise ``ElsewhereError`` unless ``value`` is an input or follows from values of the model, and is not moved."""
    for node in reached([value], lambda node: [a for a in node.all_input_nodes if not is_metadata(a)]):
        moves = node.op == "call_method" and node.target in _MOVES
        made = node.op == "call_function" and not any(not is_metadata(a) for a in node.all_input_nodes)
        if moves or made or "device" in node.kwargs:
            raise ElsewhereError(f"the device of {node.name} is asked, which may be another one than the model's")
