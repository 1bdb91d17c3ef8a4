"""Answers that the data may change, and that the graph checks in every step.

Modules may ask data: ``if not isfinite(x).all(): x = x.clamp(...)``. They run on fake tensors with both answers. An
answer about sizes and structure behind them that is the same for both is taken::

    encoder ── getattr last_hidden_state ── expect_answer (3 items) ── ...
        └ isfinite(x).all()?  yes: 3 items   no: 3 items
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from nxdpp.tracing.graph.calls import record_opaque_call
from nxdpp.tracing.graph.checks import run_in_every_step
from nxdpp.tracing.sizes.sizes import number_of_items, whole_number
from nxdpp.tracing.values.items_of_dicts import keys_of
from nxdpp.tracing.values.number_proxy import constant_value

_QUESTIONS = {read.__name__: read for read in (bool, constant_value, keys_of, len, number_of_items, whole_number)}


def expect_answer(value: Any, question: str, answer: Any) -> None:
    """Raise ``RuntimeError`` unless ``answer`` is the answer to ``question`` about ``value``."""
    found = _QUESTIONS[question](value)
    if found != answer:
        raise RuntimeError(
            f"the data decide about a size between layers: the answer to {question} is {found}, and the trace took "
            f"{answer}. Make the module that asks for it a leaf (leaf_module_cls)."
        )


def check_in_every_step(value: fx.Proxy, read: Callable[[Any], Any], answer: Any) -> None:
    """Add a node that compares ``read(value)`` with ``answer`` in every step."""
    run_in_every_step(record_opaque_call(expect_answer, (value, read.__name__, answer), {}))


def is_checked(read: Callable[[Any], Any]) -> bool:
    """Return whether the graph can check the answer to this question."""
    return _QUESTIONS.get(read.__name__) is read
