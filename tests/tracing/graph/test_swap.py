"""Swapped values come back; stable sets have one order in every process."""

import pytest
from torch import nn

from nxdpp.tracing.graph.swap import StableSet, stable_attributes, swapped


def test_values_come_back_also_after_an_error() -> None:
    original = object()
    dictionary = {"a": original, "b": 2}

    def fail_inside() -> None:
        with swapped(dictionary, {"a": 1}):
            assert dictionary == {"a": 1, "b": 2}
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert dictionary["a"] is original
    assert dictionary["b"] == 2


def test_members_are_ordered_by_repr() -> None:
    members = [chr(letter) for letter in range(ord("a"), ord("z"))]
    assert list(StableSet(reversed(members))) == members


def test_every_set_is_an_instance() -> None:
    assert isinstance({1, 2}, StableSet)
    assert not isinstance([1, 2], StableSet)
    assert StableSet([2, 1, 2]) == {1, 2}


def test_attributes_are_in_order_for_a_while() -> None:
    module, names = nn.Module(), {"b", "a"}
    vars(module)["names"] = names
    with stable_attributes([module]):
        assert list(vars(module)["names"]) == ["a", "b"]
    assert vars(module)["names"] is names
