"""Fields of objects that modules return: ``output.mask``, and those with a name that tensors have (``output.mean``)."""

import dis
import operator
import sys
from types import FrameType

import torch
from torch import fx

from nxdpp.tracing.checks import is_user_function, passes_on

# Methods of outputs that are mappings.
_METHODS_OF_MAPPINGS = frozenset({"get", "items", "keys", "pop", "to_tuple", "values"})
# Attributes of tensors that are no methods, and that an object may have as a field.
_NAMES = frozenset({"H", "T", "data", "imag", "layout", "mH", "mT", "name", "names", "real", "volatile"})
# Since Python 3.12 the lowest bit of the argument tells a method.
_HAS_METHOD_BIT = sys.version_info >= (3, 12)


def is_field(node: fx.Node, name: str) -> bool:
    """Return whether ``name`` is a field of an object that a module or a function returns: no tensor has it."""
    return not hasattr(torch.Tensor, name) and name not in _METHODS_OF_MAPPINGS and _is_part_of_output(node)


def may_be_field(node: fx.Node, name: str, caller: FrameType) -> bool:
    """Return whether ``name``, which tensors have, may be a field here: ``caller`` does not call it as a method."""
    if name.startswith("_") or not _is_part_of_output(node):
        return False
    if name in _NAMES:
        return True
    return callable(getattr(torch.Tensor, name, None)) and not _loads_method(caller)


def _is_part_of_output(node: fx.Node) -> bool:
    """Return whether ``node`` is what a module or a function of the user returns, or a part of it."""
    while node.op == "call_function" and (passes_on(node) or node.target in (getattr, operator.getitem)):
        if not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node.op == "call_module" or is_user_function(node)


def _loads_method(frame: FrameType) -> bool:
    code = frame.f_code.co_code
    opname = dis.opname[code[frame.f_lasti]]
    return opname == "LOAD_METHOD" or (_HAS_METHOD_BIT and opname == "LOAD_ATTR" and bool(code[frame.f_lasti + 1] & 1))
