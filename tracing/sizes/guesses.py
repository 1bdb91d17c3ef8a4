"""Guessed answers to questions about inputs of unknown shape.

A partition needs only the order of the modules. A trace with guesses finds it before a step gives real inputs. Its
graph is never run.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.uses import metadata_arguments

# A loop that sizes end would not end with a guess.
MOST_GUESSES = 1000
_SIZE = 2
_ARITHMETIC = frozenset({operator.__name__, math.__name__, "_operator", "builtins"})
# Attributes of a tensor that have its elements.
_VIEWS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})
# Methods and functions that read no elements.
_OF_METADATA = frozenset(
    {"size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "is_complex", "is_contiguous",
     "element_size", "get_device"}
)  # fmt: skip


def guessed_answer(node: fx.Node, read: Callable[[Any], Any], guess: bool, root: nn.Module) -> Any:
    """Return a guess of ``read(value of node)``; ``None`` where the elements of a tensor decide.

    Questions of yes and no are answered by ``guess``, numbers are small.
    """
    if read is bool:
        return None if _reads_elements(node, root) else guess
    if read.__name__ == "number_of_items" or read is len:
        return _SIZE
    if read.__name__ == "keys_of":
        return None
    return None if _reads_elements(node, root) else _SIZE


def _reads_elements(node: fx.Node, root: nn.Module) -> bool:
    """Return whether the value of ``node`` follows from the elements of a tensor, not only from its shape."""
    pending: list[tuple[fx.Node, bool]] = [(node, False)]
    seen: set[fx.Node] = set()
    while pending:
        current, is_item = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if _makes_a_tensor(current, is_item):
            return True
        is_attribute = current.target is getattr and current.args[1] not in _VIEWS
        if is_attribute or getattr(current.target, "__name__", current.target) in _OF_METADATA:
            continue
        only_metadata = metadata_arguments(current, root)
        is_item = current.target is operator.getitem
        pending += [(argument, is_item) for argument in current.all_input_nodes if argument not in only_metadata]
    return False


def _makes_a_tensor(node: fx.Node, is_item: bool) -> bool:
    # An item of a module's output may be a size, as may an input of the model and the result of a user's function.
    if node.op == "call_module":
        return not is_item
    if node.op == "call_method":
        return node.target not in _OF_METADATA
    if node.op != "call_function" or isinstance(node.target, OpaqueCall):
        return False
    if getattr(node.target, "__name__", None) in _OF_METADATA:
        return False
    return getattr(node.target, "__module__", None) not in _ARITHMETIC
