"""Swapped values come back; stable sets have one order in every process."""

from torch import nn

from nxdpp.tracing.graph.swap import StableSet, stable_attributes


def test_members_are_ordered_by_repr() -> None:
    members = [chr(letter) for letter in range(ord("a"), ord("z"))]
    assert list(StableSet(reversed(members))) == members


def test_attributes_are_in_order_for_a_while() -> None:
    module, names = nn.Module(), {"b", "a"}
    vars(module)["names"] = names
    with stable_attributes([module]):
        assert list(vars(module)["names"]) == ["a", "b"]
    assert vars(module)["names"] is names
