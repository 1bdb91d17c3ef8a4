"""What is swapped comes back, whatever happens in between."""

import pytest

from nxdpp.tracing.swap import swapped


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
