"""Dataclasses are nested values like tuples and dicts."""

from typing import Any, NamedTuple

from nxdpp.tracing.values.nested import leaves_of, map_leaves


class _Numbers(NamedTuple):
    one: Any
    two: Any


class Ordered(_Numbers):
    """Two numbers in their order."""

    def __new__(cls, one: Any, two: Any) -> "Ordered":
        assert one < two
        return super().__new__(cls, one, two)


def test_the_constructor_of_a_named_tuple_does_not_run() -> None:
    value = Ordered(1, 2)
    value.note = "kept"  # type: ignore[attr-defined]

    mapped = map_leaves(lambda leaf: -leaf if isinstance(leaf, int) else leaf, [value])[0]

    assert type(mapped) is Ordered
    assert mapped == (-1, -2)
    assert vars(mapped) == {"note": "kept"}
    assert leaves_of(value) == [1, 2, "kept"]
