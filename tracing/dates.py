"""Dates of a clock: ``datetime.now()`` and its like give dates that know their origin, as times of ``clocks.py`` do."""

import datetime
import sys
from collections.abc import Callable
from typing import Any

from nxdpp.tracing.own_code import is_watched

_DATE = ("year", "month", "day")
_TIME = ("hour", "minute", "second", "microsecond")
_ELAPSED = ("days", "seconds", "microseconds")
_FIELDS: dict[type, tuple[str, ...]] = {
    datetime.date: _DATE,
    datetime.time: (*_TIME, "tzinfo"),
    datetime.datetime: (*_DATE, *_TIME, "tzinfo"),
    datetime.timedelta: _ELAPSED,
}
# Methods whose result follows from the clock.
_METHODS = ("astimezone", "date", "isoweekday", "time", "timestamp", "toordinal", "total_seconds", "weekday")


class LocalTime(tuple[Any, ...]):
    """The fields of ``time.localtime()``, which know their origin."""

    __slots__ = ()

    tm_year = property(lambda self: self[0])
    tm_mon = property(lambda self: self[1])
    tm_mday = property(lambda self: self[2])
    tm_hour = property(lambda self: self[3])
    tm_min = property(lambda self: self[4])
    tm_sec = property(lambda self: self[5])
    tm_wday = property(lambda self: self[6])
    tm_yday = property(lambda self: self[7])
    tm_isdst = property(lambda self: self[8])


def date_types(
    type_of_times: Callable[[type], type], computed: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> dict[type, Callable[[Any], Any]]:
    """Return, by the type of a date, the function that gives it its origin.

    Args:
        type_of_times: makes the subclass whose comparisons are refused.
        computed: makes a function whose result has its origin.
    """
    return {base: _giver(base, type_of_times(base), computed) for base in _FIELDS}


def _giver(
    base: type, base_of_times: type, computed: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Any], Any]:
    fields = _FIELDS[base]
    members: dict[str, Any] = {n: property(computed(getattr(base, n).__get__)) for n in fields if n != "tzinfo"}
    members |= {n: computed(getattr(base, n)) for n in _METHODS if hasattr(base, n)}
    cls = type(base.__name__, (base_of_times,), {"__slots__": (), "__hash__": base.__hash__, **members})

    def give(value: Any) -> Any:
        return cls(*(getattr(value, name) for name in fields))

    return give


class _ClockClass(type):
    """A class of dates whose instances are those of the original one."""

    original: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.original(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __eq__(cls, other: object) -> bool:
        return other is cls.original or other is cls

    def __hash__(cls) -> int:
        return hash(cls.original)


def clock_class(original: Any, later: int, read: Callable[[Any], Any]) -> type:
    """Return a class like ``original``, whose dates of the clock are ``later`` seconds later for the watched code.

    ``read`` gives a date its origin.
    """
    shift = datetime.timedelta(seconds=later)

    def asking(name: str) -> Any:
        def now(cls: Any, *args: Any, **kwargs: Any) -> Any:
            value = getattr(original, name)(*args, **kwargs)
            return read(value + shift) if is_watched(sys._getframe(1)) else value

        return classmethod(now)

    def from_timestamp(cls: Any, seconds: Any, *args: Any, **kwargs: Any) -> Any:
        value = original.fromtimestamp(seconds, *args, **kwargs)
        return value if type(seconds) in (int, float) else read(value)

    names = [name for name in ("now", "utcnow", "today") if hasattr(original, name)]
    members = {name: asking(name) for name in names} | {"fromtimestamp": classmethod(from_timestamp)}
    return _ClockClass(original.__name__, (original,), {"original": original, **members})
