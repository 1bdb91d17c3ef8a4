"""Swapped values come back; stable sets have one order in every process."""

import pytest
from torch import nn

from nxdpp.tracing.swap import StableSet, stable_attributes, swapped


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


def test_its_order_is_that_of_what_its_members_print_as() -> None:
    members = [chr(letter) for letter in range(ord("a"), ord("z"))]
    assert list(StableSet(reversed(members))) == members


def test_every_set_is_one_of_its_kind() -> None:
    assert isinstance({1, 2}, StableSet)
    assert not isinstance([1, 2], StableSet)
    assert StableSet([2, 1, 2]) == {1, 2}


def test_attributes_are_in_order_for_a_while() -> None:
    module, kinds = nn.Module(), {"b", "a"}
    vars(module)["kinds"] = kinds
    with stable_attributes([module]):
        assert list(vars(module)["kinds"]) == ["a", "b"]
    assert vars(module)["kinds"] is kinds
