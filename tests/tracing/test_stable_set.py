"""A set in a stable order is a set, and orders alike in every process."""

import subprocess
import sys

from torch import nn

from nxdpp.tracing.stable_set import StableSet, stable_attributes

ORDER = "from nxdpp.tracing.stable_set import StableSet; print(*StableSet(['b', 'c', 'a', 'd', 'e']))"


def test_its_order_does_not_depend_on_the_process() -> None:
    orders = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", ORDER]
        orders.add(subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True).stdout)
    assert orders == {"a b c d e\n"}


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
