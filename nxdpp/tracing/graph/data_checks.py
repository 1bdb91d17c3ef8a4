"""Checks of data in the spine that only raise: run in every step, not decided by the trace.

==========================================================  ============================================
code between layers                                         node of the graph
==========================================================  ============================================
``if x.isnan().any(): raise ValueError(...)``               raises ``ValueError`` where the value is true
``if a or b: raise ...``                                    raises for each value
``assert x``                                                raises ``AssertionError``
``torch._assert``, ``torch._check`` and transformers' own   raises the error of the function
==========================================================  ============================================
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import fx
from transformers.utils import import_utils

from nxdpp.ground.torch_names import ASSERT, ASSERT_ASYNC, CHECK_WITH
from nxdpp.tracing.code.frames import Frame
from nxdpp.tracing.code.raising import Raises, branches_that_raise
from nxdpp.tracing.graph.calls import record_opaque_call
from nxdpp.tracing.graph.checks import run_in_every_step
from nxdpp.tracing.graph.errors import calling_line, model_line, stack_line
from nxdpp.tracing.graph.swap import replaced, swapped

_CHECKS = frozenset({ASSERT.name, ASSERT_ASYNC.name})
# transformers 5.0 has no such function.
_COMPILABLE = getattr(import_utils, "torch_compilable_check", None)


def raise_where(value: Any, truth: bool, error: type[Exception], text: str, place: str) -> None:
    """Raise ``error``, or ``RuntimeError`` if it takes no text, where ``value`` has that truth; waits for a GPU."""
    if bool(value) is not truth:
        return
    told = "an assertion of the model does not hold" if error is AssertionError else "the model raises for this data"
    message = f"{told}{': ' if text else ''}{text}\n  at {place}"
    try:
        raised = error(message)
    except Exception:
        raised = RuntimeError(f"{error.__name__}: {message}")
    raise raised


def truth_that_continues(value: fx.Proxy, asker: Frame) -> bool | None:
    """Return the truth of ``value`` with which the code of ``asker`` continues where it raises for the other one.

    The check is recorded. ``None`` for code that does more.
    """
    raises = branches_that_raise(asker)
    if len(raises) != 1:
        return None
    ((truth, raised),) = raises.items()
    _record(value, truth, raised, model_line(stack_line(asker)))
    return not truth


def is_check(node: fx.Node) -> bool:
    """Return whether ``node`` calls a function of torch that only checks its argument."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _CHECKS


@contextmanager
def recorded_checks(sources: list[ModuleType]) -> Iterator[None]:
    """Record ``torch._check`` and its kin, and ``torch_compilable_check`` in the globals of ``sources``."""
    # Without the name torch's own code refuses a traced condition.
    kin = {CHECK_WITH.name: _check_with} if CHECK_WITH.exists else {}
    changes = {} if _COMPILABLE is None else {id(_COMPILABLE): compilable_check}
    with swapped(vars(torch), kin), replaced(map(vars, sources), changes):
        yield


def compilable_check(cond: Any, msg: Any, error_type: type[Exception] = ValueError) -> None:
    """``transformers.utils.torch_compilable_check`` for traced code."""
    cond = cond() if callable(cond) and not isinstance(cond, fx.Proxy) else cond
    if isinstance(cond, fx.Proxy):
        if os.getenv("TRANSFORMERS_DISABLE_TORCH_CHECK", "0") != "1":
            _check(record_opaque_call(_all_true, (cond,), {}), error_type, msg)
        return
    assert _COMPILABLE is not None
    _COMPILABLE(cond, msg, error_type)


def _check_with(error_type: type[Exception], cond: Any, message: Any = None) -> None:
    if isinstance(cond, fx.Proxy):
        _check(cond, error_type, message)
    else:
        CHECK_WITH(error_type, cond, message)


def _check(value: fx.Proxy, error: type[Exception], message: Any) -> None:
    text = message if isinstance(message, str) else ""
    _record(value, False, Raises(error, text), model_line(calling_line()))


def _all_true(value: Any) -> bool:
    return bool(value.all()) if isinstance(value, torch.Tensor) else bool(value)


def _record(value: fx.Proxy, truth: bool, raises: Raises, place: str) -> None:
    run_in_every_step(record_opaque_call(raise_where, (value, truth, raises.error, raises.text, place), {}).node)
