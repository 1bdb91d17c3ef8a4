"""Values of functions that may return ``None`` in a step: the masks of transformers, which no kernel may need.

Python asks no object whether it ``is None``, so no proxy can answer. Mostly nobody asks: the code above the layers only
hands such a value on, and a step may have either. But where a "layer" is inside of attention (``nn.Linear``), or the
model's own code asks, the graph has one of two ways. A run with ``None`` in place of these values tells::

    first run       mask ── layers.0 ── layers.1       equal but for the mask: no code asks
    run with None   None ── layers.0 ── layers.1

    first run       q, k, v, mask ── attention         different, or an error: the sizes of the inputs give the answer,
    run with None   q, k, v ── causal attention        which is a fact of the graph

Where data give it, the trace takes the value to be there, and each step checks that. A "layer" inside of a layer that
the model declares is refused instead.

So ``x is None``, ``if x``, ``isinstance(x, Tensor)``, ``type(x)`` and whatever else code asks has the answer of a step.
"""

from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache, partial
from typing import Any, get_args

from torch import fx
from torch.fx.proxy import TraceError

from nxdpp.tracing.graph.checks import annotated_result, checked_for_none
from nxdpp.tracing.sizes.sizes import UnknownSizeError, is_none


class Absence(Enum):
    """Ways to take values that may be ``None``: as values, as ``None``, or as they are for the sizes of the inputs.

    Values of which data tell are ``CHECKED`` in each step, or ``REFUSED``.
    """

    OPEN = auto()
    NONE = auto()
    CHECKED = auto()
    REFUSED = auto()


def value_or_absent(value: Any, function: Callable[..., Any]) -> Any:
    """``value`` of the recorded ``function``, or ``None`` in a run that takes it as that.

    Raises ``TraceError`` where only data tell whether the value is there, and the run refuses that.
    """
    original = function.func if isinstance(function, partial) else function
    if not issubclass(type(value), fx.Proxy) or not _may_return_none(original):
        return value
    tracer = value.tracer
    if not hasattr(tracer, "may_be_absent"):
        return value  # of torch's own tracer
    tracer.may_be_absent.append(value.node)
    if tracer.absence in (Absence.OPEN, Absence.NONE):
        return value if tracer.absence is Absence.OPEN else None
    try:
        return None if tracer.fact(value.node, is_none) else value
    except UnknownSizeError as error:
        if tracer.absence is Absence.CHECKED:
            return checked_for_none(value, False, True)
        raise tracer.refused(
            TraceError(
                f"code above the transformer layers asks whether the result of {value.node.target.__name__} is None, "
                f"which is only told by the data ({error}); a graph has one way for all data"
            )
        ) from error


@lru_cache(1024)
def _may_return_none(function: Callable[..., Any]) -> bool:
    """Return whether ``None`` is in the annotation of what ``function`` returns."""
    return type(None) in get_args(annotated_result(function))
