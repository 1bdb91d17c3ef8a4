"""Times that code outside layers reads: they may be logged, and must decide about nothing.

A comparison may have the same answer in both runs of the spine (``time.time_ns() % 2``), and another one later. So a
clock gives a number that knows its origin. Arithmetic keeps that, and a comparison in the user's code is refused::

    start = time.perf_counter()
    hidden = self.embedding(x)
    print(f"{time.perf_counter() - start:.3f} s")       allowed
    if time.time_ns() % 2: ...                           refused
"""

import datetime
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nxdpp.tracing.dates import LocalTime, clock_class, date_types
from nxdpp.tracing.own_code import is_watched
from nxdpp.tracing.swap import swapped

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_ARITHMETIC = (
    "abs", "add", "and", "ceil", "divmod", "floor", "floordiv", "invert", "lshift", "mod", "mul", "neg", "or", "pos",
    "pow", "radd", "rdivmod", "rfloordiv", "rmod", "rmul", "round", "rpow", "rshift", "rsub", "rtruediv", "sub",
    "truediv", "trunc", "xor",
)  # fmt: skip
_QUESTIONS = ("bool", "eq", "ge", "gt", "le", "lt", "ne")
# The second run of a spine reads later times: numbers made by int() have no origin, and should differ.
_LATER_SECONDS = 1_000_003


def _computed(method: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, *others: Any, **named: Any) -> Any:
        result = method(self, *others, **named)
        if result is NotImplemented and isinstance(self, int) and any(isinstance(other, float) for other in others):
            result = getattr(float, method.__name__)(float(int(self)), *others)
        return _read(result)

    return compute


def _asked(method: Callable[..., Any]) -> Callable[..., Any]:
    def ask(self: Any, *others: Any) -> Any:
        if is_watched(sys._getframe(1)):
            raise RuntimeError(
                "forward compares a time outside the transformer layers; traced, the answer would be the same in all "
                "steps. Compare it in a layer, or in a module without layers, or around the step."
            )
        return method(self, *others)

    return ask


def _type_of_times(base: type) -> type:
    members: dict[str, Any] = {"__hash__": base.__hash__, "__slots__": ()}
    for make, names in ((_computed, _ARITHMETIC), (_asked, _QUESTIONS)):
        members |= {n: make(getattr(base, n)) for n in (f"__{name}__" for name in names) if hasattr(base, n)}
    return type(f"{base.__name__}_time", (base,), members)


# By the type of a value: the function that gives it its origin.
_TIMES: dict[type, Callable[[Any], Any]] = {
    **{base: _type_of_times(base) for base in (int, float)},
    **date_types(_type_of_times, _computed),
}


def _read(value: Any) -> Any:
    """``value`` with its origin: a clock."""
    if type(value) is tuple:
        return tuple(map(_read, value))
    return _TIMES[type(value)](value) if type(value) in _TIMES else value


@contextmanager
def watched_clocks(namespaces: Iterable[dict[str, Any]], second_run: bool) -> Iterator[None]:
    """Give times that are refused in comparisons to the watched code, which may have clocks in ``namespaces``."""
    later = _LATER_SECONDS if second_run else 0
    replaced: dict[int, Any] = {}
    for name in _CLOCKS:
        replaced[id(vars(time)[name])] = _clock(vars(time)[name], later)
        replaced[id(vars(time)[f"{name}_ns"])] = _clock(vars(time)[f"{name}_ns"], later * 10**9 + later)
    for function in (time.localtime, time.gmtime):
        replaced[id(function)] = _local_clock(function, later)
    for cls in (datetime.date, datetime.datetime):
        replaced[id(cls)] = clock_class(cls, later, _read)
    with ExitStack() as stack:
        for namespace in (vars(time), vars(datetime), *namespaces):
            found = {name: replaced[id(value)] for name, value in namespace.items() if id(value) in replaced}
            stack.enter_context(swapped(namespace, found))
        yield


def _clock(function: Callable[[], Any], later: int) -> Callable[[], Any]:
    def clock() -> Any:
        return _read(function() + later) if is_watched(sys._getframe(1)) else function()

    return clock


def _local_clock(function: Callable[[float], Any], later: int) -> Callable[..., Any]:
    original_time = time.time

    def clock(seconds: float | None = None) -> Any:
        if not is_watched(sys._getframe(1)):
            return function(original_time() if seconds is None else seconds)
        if seconds is None:
            return LocalTime(map(_read, function(original_time() + later)))
        fields = function(seconds)
        return fields if type(seconds) in (int, float) else LocalTime(map(_read, fields))

    return clock
