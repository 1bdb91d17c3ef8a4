"""Selections by data that are taken to have items: ``if labels[labels >= 0].size(0) > 0``.

Code asks for the number of items to leave out a computation on nothing. The trace takes the way with items, and the
graph checks in every step that there are some.
"""

import operator
from typing import Any

from torch import fx

from nxdpp.tracing.graph.calls import record_opaque_call
from nxdpp.tracing.graph.checks import run_in_every_step
from nxdpp.tracing.graph.errors import calling_line, model_line

# Comparisons of a number of items with a number: the answer if there are items.
_WITH_ITEMS: dict[tuple[Any, int], bool] = {
    (operator.gt, 0): True, (operator.ne, 0): True, (operator.ge, 1): True,
    (operator.eq, 0): False, (operator.le, 0): False, (operator.lt, 1): False,
}  # fmt: skip


def expect_items(answer: Any, expected: bool, place: str) -> None:
    """Raise ``RuntimeError`` unless ``answer`` is ``expected``."""
    if bool(answer) is not expected:
        raise RuntimeError(
            f"the data select no item; the trace took them to select some\n  at {place}\n"
            f"Give every microbatch an item that is selected, or make the module that holds this line a leaf "
            f"(leaf_module_cls)."
        )


def answer_with_items(question: fx.Proxy) -> bool | None:
    """Return the answer of ``question`` if its data select items, and record a check; ``None`` for any other question.

    Ask only where the answer depends on data.
    """
    node = question.node
    if node.op != "call_function" or len(node.args) != 2 or not _is_number_of_items(node.args[0]):
        return None
    number = node.args[1]
    expected = _WITH_ITEMS.get((node.target, number)) if type(number) is int else None
    if expected is not None:
        run_in_every_step(record_opaque_call(expect_items, (question, expected, model_line(calling_line())), {}))
    return expected


def _is_number_of_items(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return False
    if value.op == "call_method":
        return value.target in ("numel", "nelement") or (value.target == "size" and len(value.args) == 2)
    if value.op != "call_function" or value.target is not operator.getitem or not isinstance(value.args[0], fx.Node):
        return False
    shape = value.args[0]
    return (shape.target is getattr and shape.args[1] == "shape") or (
        shape.op == "call_method" and shape.target == "size" and len(shape.args) == 1
    )
