"""Answers to questions about devices: ``x.is_cuda``, ``x.device.type == "mps"``.

Fake tensors are on the CPU. A question is answered for the device of the model, where the traced value is surely
there, and is refused where it may be elsewhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from nxdpp.tracing.graph.search import reached
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.metadata import is_metadata

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
    """Return the value of ``node``, which asks for a device, on ``device``.

    ``other`` gives the value of a node that does not. Raises ``ElsewhereError``.
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
    if node.op == "call_method":
        return node.target == "get_device"
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("device", *_TYPES)


def _refuse_elsewhere(value: Any) -> None:
    """Raise ``ElsewhereError`` unless ``value`` is an input or follows from values of the model, and is not moved."""
    for node in reached([value], lambda node: [a for a in node.all_input_nodes if not is_metadata(a)]):
        moves = node.op == "call_method" and node.target in _MOVES
        made = node.op == "call_function" and not any(not is_metadata(a) for a in node.all_input_nodes)
        if moves or made or "device" in node.kwargs:
            raise ElsewhereError(f"the device of {node.name} is asked, which may be another one than the model's")
