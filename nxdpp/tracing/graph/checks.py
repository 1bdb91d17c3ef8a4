"""Assumptions that a trace makes about a value, checked when the graph runs.

=====================  ===========================================================================
code between layers    assumption
=====================  ===========================================================================
``isinstance(x, c)``   ``x`` is a tensor, or a number of the type in its spec
``x is None``          ``x`` is ``None`` if it is for inputs of these sizes, and a value otherwise
=====================  ===========================================================================

Python does not let a proxy answer ``x is None``. The trace therefore decides before the code can ask: an item of a
module's output becomes a plain ``None`` where a run on fake tensors gives ``None``, and is checked otherwise.
"""

import builtins
import inspect
import operator
import re
import types
from typing import Any, Literal, get_args

from torch import fx, nn

from nxdpp.tracing.code.frames import caller
from nxdpp.tracing.code.none_tests import may_be_tested, sets_none
from nxdpp.tracing.graph.calls import OpaqueCall, record_opaque_call
from nxdpp.tracing.graph.errors import calling_frame, calling_line, model_line
from nxdpp.tracing.graph.uses import is_from_torch, makes_mask
from nxdpp.tracing.modules.listings import submodule, unwrapped

_MUST_RUN = "must_run"
_READS = ("call_function", "call_method")
_LIBRARIES = re.compile(r"(torch|transformers|nxdpp|einops)\b")


def expect_type(value: Any, classes: Any, expected: bool) -> Any:
    """Return ``value``. Raise ``RuntimeError`` unless ``isinstance(value, classes)`` is ``expected``."""
    if builtins.isinstance(value, classes) is not expected:
        raise RuntimeError(
            f"a value between layers is a {type(value).__name__}; the trace took it {'' if expected else 'not '}to be "
            f"one of {classes}. Make the module that asks for its type a leaf (leaf_module_cls), or the function a "
            f"single node (autowrap_functions)."
        )
    return value


def expect_value(value: Any, place: str) -> Any:
    """Return ``value``. Raise ``RuntimeError`` where it is ``None``."""
    if value is None:
        raise RuntimeError(
            f"a value between layers is None; the trace took it not to be None\n  at {place}\n"
            f"Annotate the result of the module's forward (-> torch.Tensor | None), make the module that holds this "
            f"line a leaf (leaf_module_cls), or the function a single node (autowrap_functions)."
        )
    return value


def expect_none(value: Any, place: str) -> None:
    """Raise ``RuntimeError`` unless ``value`` is ``None``."""
    if value is not None:
        raise RuntimeError(
            f"a value between layers is a {type(value).__name__}; the trace took it to be None\n  at {place}\n"
            f"Make the module that holds this line a leaf (leaf_module_cls), or the function a single node "
            f"(autowrap_functions)."
        )


def run_in_every_step(value: fx.Proxy | fx.Node) -> None:
    """Make a node run although no other node uses its value."""
    (value.node if builtins.isinstance(value, fx.Proxy) else value).meta[_MUST_RUN] = True


def must_run(node: fx.Node) -> bool:
    """Return whether ``node`` is a check that runs although no other node uses its value."""
    return bool(node.meta.get(_MUST_RUN))


def passes_on(node: fx.Node) -> bool:
    """Return whether ``node`` is a check that returns its argument."""
    return builtins.isinstance(node.target, OpaqueCall) and node.target.function in (expect_type, expect_value)


def asks_for_none(node: fx.Node) -> bool:
    """Return whether ``node`` checks that a value is, or is not, ``None``."""
    return builtins.isinstance(node.target, OpaqueCall) and node.target.function in (expect_none, expect_value)


def value_or_none(value: fx.Proxy) -> fx.Proxy | None:
    """``value``, checked to be one where a module or a wrapped function may return ``None`` for it, or ``None``.

    A whole output whose annotation excludes ``None`` is a value. The graph checks in every step that a first item, and
    an output without an annotation, are values too. A run on fake tensors decides about a later item or a field, about
    an output whose annotation names ``None``, about a first item of a module whose code sets a variable to ``None``,
    and about the result of a wrapped function. It guesses where the answer
    depends on data, and the graph then checks a ``None`` too. A check runs although no node uses it: code may only
    compare with ``None``.
    """
    tracer: Any = value.tracer
    expected = _expectation(value.node, tracer.root)
    if expected == "value":
        return value
    if expected == "probably":
        return checked_for_none(value, False, True)
    is_none, is_sure = tracer.is_none(value.node)
    return checked_for_none(value, False if is_none is None and expected == "perhaps" else is_none, is_sure)


def checked_for_none(value: fx.Proxy, is_none: bool | None, is_sure: bool) -> fx.Proxy | None:
    """``value``, or ``None`` where the answers of ``tracer.is_none`` say so, with checks of what is not sure."""
    if is_none and not is_sure:
        run_in_every_step(record_opaque_call(expect_none, (value, _line()), {}))
    if is_none:
        return None
    checked = _checked(value)
    item = value.node.args[1] if value.node.target is operator.getitem else None
    # A value of which nothing is known may well be None if it is neither used nor compared.
    checked.node.meta[_MUST_RUN] = is_none is not None or may_be_tested(calling_frame(caller()), item)
    return checked


def mask_with_items(mask: fx.Proxy) -> fx.Proxy:
    """``mask``, checked to be one if transformers made it. transformers leaves out a mask that no kernel needs."""
    return _checked(mask) if makes_mask(mask.node) else mask


def _checked(value: fx.Proxy) -> fx.Proxy:
    return record_opaque_call(expect_value, (value, _line()), {})


def _line() -> str:
    return model_line(calling_line())


def _expectation(node: fx.Node, root: nn.Module) -> Literal["value", "probably", "perhaps", "either"]:
    """Return the expectation of an output, or an item of it: surely a value, probably one, or possibly ``None``.

    ``"perhaps"`` is a value if nothing can be known.
    """
    is_first = is_whole = True
    while node.op in _READS and node.args and builtins.isinstance(source := node.args[0], fx.Node):
        if passes_on(node):
            node = source
            continue
        if node.op == "call_method" and node.target != "get":
            break
        if node.target in (getattr, "get"):
            is_first = is_whole = False
            node = source
            continue
        if node.target is not operator.getitem:
            break
        index = node.args[1]
        start = index.start if builtins.isinstance(index, slice) else index
        if not builtins.isinstance(start, int | str | None) or (is_whole and builtins.isinstance(index, slice)):
            return "value"
        is_first = is_first and start in (0, None)
        is_whole = False
        node = source
    if is_user_function(node):
        return "either"
    if node.op != "call_module":
        return "value"
    module = unwrapped(submodule(root, str(node.target)))
    if is_from_torch(module):
        # Attention without its weights is the only module of torch that returns None.
        return "either" if builtins.isinstance(module, nn.MultiheadAttention) and not is_first else "value"
    if not is_whole:
        if is_first:
            return "perhaps" if sets_none(type(module).forward) else "probably"
        return "either"
    declared = return_annotation(module)
    if declared is None or type(None) in get_args(declared):
        return "either"
    return "probably" if declared is Any else "value"


def is_user_function(node: fx.Node) -> bool:
    """Return whether ``node`` calls a function of ``autowrap_functions`` that the user, or another library, wrote."""
    if not builtins.isinstance(node.target, OpaqueCall):
        return False
    function = node.target.function
    return builtins.isinstance(function, types.FunctionType) and not _LIBRARIES.match(function.__module__ or "")


def return_annotation(module: nn.Module) -> Any:
    """Return the annotation of the result of ``module.forward``, as ``annotated_result`` does."""
    return annotated_result(type(module).forward)


def annotated_result(function: Any) -> Any:
    """Return the annotation of what ``function`` returns, ``Any`` for a missing or an unusual one."""
    try:
        return inspect.get_annotations(function, eval_str=True).get("return", Any)
    except Exception:  # such as a name that only type checkers know
        return Any
