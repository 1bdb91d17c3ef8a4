"""``isinstance`` of a traced value: answered as for a tensor, and checked when the graph runs."""

import builtins
from typing import Any

import torch
from torch import fx

from nxdpp.tracing.input_specs import UNKNOWN
from nxdpp.tracing.opaque import OpaqueCall, record_opaque_call


def expect_type(value: Any, classes: Any, expected: bool) -> Any:
    """``value``, of which ``isinstance(value, classes)`` was taken to be ``expected`` when it was traced."""
    if builtins.isinstance(value, classes) is not expected:
        raise RuntimeError(
            f"a value between layers is a {type(value).__name__}; at tracing it was taken "
            f"{'' if expected else 'not '}to be one of {classes}. Make the module that asks for its type a leaf "
            f"(leaf_module_cls), or the function a single node (autowrap_functions)."
        )
    return value


def traced_isinstance(value: Any, classes: Any) -> bool:
    """``isinstance`` for code that is traced; a traced value is a tensor, unless it is known to be something else."""
    if not builtins.isinstance(value, fx.Proxy):
        return builtins.isinstance(value, classes)
    answer = issubclass(_type_of(value.node), classes)
    if value.node.op != "placeholder":
        value.node = record_opaque_call(expect_type, (value, classes, answer), {}).node
    return answer


def _type_of(node: fx.Node) -> type:
    if isinstance(node.target, OpaqueCall) and node.target.declares_dict:
        return dict
    return node.meta.get("spec", UNKNOWN).number or torch.Tensor


def traced_is_tensor(value: Any) -> bool:
    """``torch.is_tensor`` for code that is traced."""
    return traced_isinstance(value, torch.Tensor)
