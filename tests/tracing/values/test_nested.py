"""Dataclasses are nested values like tuples and dicts."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from nxdpp.tracing.values.nested import Leaf, fields_of, flatten, is_dataclass_instance, leaves_of, map_leaves


@dataclass
class State:
    hidden: Any
    rest: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.extra = 5


@dataclass(frozen=True, slots=True)
class Frozen:
    one: Any
    two: Any = None


@dataclass(frozen=True)
class Whole(Leaf):
    number: int


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


def test_leaves_of_nested_dataclasses() -> None:
    value = {"a": State(1, [Frozen(2, (3,)), None]), "b": OrderedDict(c=Whole(4))}

    assert leaves_of(value) == [1, 2, 3, None, 5, Whole(4)]


def test_unflattening_restores_the_value() -> None:
    value = (State(1, [Frozen(2), "x"]), [State(3)])

    leaves, structure = flatten(value)
    again = pytree.tree_unflatten(leaves, structure)

    assert again == value
    assert type(again[0].rest[0]) is Frozen
    assert again[0].extra == 5
    assert structure == flatten((State(7, [Frozen(8), "y"]), [State(9)]))[1]
    assert structure != flatten((State(7, [Frozen(8)]), [State(9)]))[1]


def test_a_function_reaches_every_leaf() -> None:
    tensor = torch.ones(2)

    mapped = map_leaves(lambda leaf: leaf * 2, Frozen(tensor, [State(3)]))

    assert torch.equal(mapped.one, tensor * 2)
    assert mapped.two[0].hidden == 6


def test_classes_and_declared_leaves_are_leaves() -> None:
    assert is_dataclass_instance(State(1))
    assert not is_dataclass_instance(State)
    assert not is_dataclass_instance(Whole(1))
    assert leaves_of(State) == [State]
    assert fields_of(Frozen(1)) == {"one": 1, "two": None}
