"""Leaves of nested samples and outputs."""

from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nxdpp.doors.nnscaler.nested_values import map_values, values_in

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Record:
    value: Any
    others: dict[str, Any] = field(default_factory=dict)


def test_leaves_of_all_containers() -> None:
    given = {"a": [1, (2, Pair(3, Record(4, {"b": SimpleNamespace(c=5)})))], "d": Record}
    assert values_in(given) == [1, 2, 3, 4, 5, Record]

    doubled = map_values(lambda leaf: 2 * leaf if isinstance(leaf, int) else leaf, given)
    expected = {"a": [2, (4, Pair(6, Record(8, {"b": SimpleNamespace(c=10)})))], "d": Record}
    assert doubled == expected
    assert values_in(given) == [1, 2, 3, 4, 5, Record]


def test_attributes_that_are_no_fields() -> None:
    record = Record(1)
    object.__setattr__(record, "cached", 2)
    assert values_in(map_values(lambda leaf: leaf + 1, record)) == [2, 3]
