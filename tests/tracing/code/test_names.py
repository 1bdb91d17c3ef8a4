"""Names that the code of functions uses."""

from typing import Any

from nxdpp.tracing.code.names import names_on_others


def names_of(function: Any) -> frozenset[str]:
    return names_on_others(function)


class Reading:
    own = 1

    def puts_a_name_together(self, other: Any) -> Any:
        return getattr(other, "put_" + "together"), self.own

    @staticmethod
    def of_its_argument(layer: Any) -> Any:
        return layer.gain


def test_a_name_that_is_put_together_from_constants_is_known() -> None:
    names = names_of(Reading.puts_a_name_together)
    assert "put_together" in names
    assert "own" not in names


def test_the_first_argument_of_a_static_method_is_another_object() -> None:
    assert "gain" in names_of(Reading.of_its_argument)
