"""Fields of objects that modules return: ``output.mask``, and those with a name that tensors have (``output.mean``)."""

import operator

import torch
from torch import fx

from nxdpp.tracing.code.frames import Frame, calls_attribute
from nxdpp.tracing.graph.checks import is_user_function, passes_on

# Methods of outputs that are mappings.
_METHODS_OF_MAPPINGS = frozenset({"get", "items", "keys", "pop", "to_tuple", "values"})
# Attributes of tensors that are not methods, and that an object may have as a field.
_NAMES = frozenset({"H", "T", "data", "imag", "layout", "mH", "mT", "name", "names", "real", "volatile"})


def is_field(node: fx.Node, name: str) -> bool:
    """Return whether ``name`` is a field of an object that a module or a function returns: no tensor has it."""
    return not hasattr(torch.Tensor, name) and name not in _METHODS_OF_MAPPINGS and _is_part_of_output(node)


def may_be_field(node: fx.Node, name: str, asker: Frame) -> bool:
    """Return whether ``name``, which tensors have, may be a field here: ``asker`` does not call it as a method."""
    if name.startswith("_") or not _is_part_of_output(node):
        return False
    if name in _NAMES:
        return True
    return callable(getattr(torch.Tensor, name, None)) and not calls_attribute(asker)


def _is_part_of_output(node: fx.Node) -> bool:
    """Return whether ``node`` is what a module or a function of the user returns, or a part of it."""
    while node.op == "call_function" and (passes_on(node) or node.target in (getattr, operator.getitem)):
        if not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node.op == "call_module" or is_user_function(node)
