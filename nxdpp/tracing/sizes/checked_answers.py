"""Answers that the data may change, and that the graph checks in every step.

Modules may ask data: ``if not isfinite(x).all(): x = x.clamp(...)``. They run on fake tensors with both answers. An
answer about sizes and structure behind them that is the same for both is taken::

    encoder ── getattr last_hidden_state ── expect_answer (3 items) ── ...
        └ isfinite(x).all()?  yes: 3 items   no: 3 items

Code asks for the number of items that data select, to leave out a computation on nothing:
``if labels[labels >= 0].size(0) > 0``. The trace takes the way with items.
"""

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from nxdpp.tracing.graph.calls import record_opaque_call
from nxdpp.tracing.graph.checks import run_in_every_step
from nxdpp.tracing.graph.errors import calling_line, model_line
from nxdpp.tracing.sizes.sizes import number_of_items, whole_number
from nxdpp.tracing.values.items_of_dicts import keys_of
from nxdpp.tracing.values.metadata import is_shape
from nxdpp.tracing.values.number_proxy import constant_value

_QUESTIONS = {read.__name__: read for read in (bool, constant_value, keys_of, len, number_of_items, whole_number)}


def expect_answer(value: Any, question: str, answer: Any, message: str | None) -> None:
    """Raise ``RuntimeError`` unless ``answer`` is the answer to ``question`` about ``value``."""
    found = _QUESTIONS[question](value)
    if found != answer:
        raise RuntimeError(
            message
            or f"the data decide about a size between layers: the answer to {question} is {found}, and the trace took "
            f"{answer}. Make the module that asks for it a leaf (leaf_module_cls)."
        )


def check_in_every_step(value: fx.Proxy, read: Callable[[Any], Any], answer: Any, message: str | None = None) -> None:
    """Add a node that compares ``read(value)`` with ``answer`` in every step."""
    run_in_every_step(record_opaque_call(expect_answer, (value, read.__name__, answer, message), {}))


def is_checked(read: Callable[[Any], Any]) -> bool:
    """Return whether the graph can check the answer to this question."""
    return _QUESTIONS.get(read.__name__) is read


# Comparisons of a number of items with a number: the answer if there are items.
_WITH_ITEMS: dict[tuple[Any, int], bool] = {
    (operator.gt, 0): True, (operator.ne, 0): True, (operator.ge, 1): True,
    (operator.eq, 0): False, (operator.le, 0): False, (operator.lt, 1): False,
}  # fmt: skip


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
        message = (
            f"the data select no item; the trace took them to select some\n  at {model_line(calling_line())}\n"
            f"Give every microbatch an item that is selected, or make the module that holds this line a leaf "
            f"(leaf_module_cls)."
        )
        check_in_every_step(question, bool, expected, message)
    return expected


def _is_number_of_items(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return False
    if value.op == "call_method":
        return value.target in ("numel", "nelement") or (value.target == "size" and len(value.args) == 2)
    if value.op != "call_function" or value.target is not operator.getitem or not isinstance(value.args[0], fx.Node):
        return False
    return is_shape(value.args[0])
