"""Source of calls: one line where it fits, and numbered names as an expression."""

from typing import Any

import pytest

from nxdpp.planning.written.source import call, value_text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["m.0", "m.1"], "['m.0', 'm.1']"),
        ([f"m.layers.{n}" for n in range(1, 127, 2)], '[f"m.layers.{layer}" for layer in range(1, 126, 2)]'),
        ([f"m.{n}" for n in (0, 1, 3, 4)], '[f"m.{layer}" for layer in (0, 1, 3, 4)]'),
        (["e.0", "e.1", "d.0", "d.1"], "['e.0', 'e.1', 'd.0', 'd.1']"),
        (["a", "b", "c", "d"], "['a', 'b', 'c', 'd']"),
    ],
)
def test_numbered_names_are_folded(names: list[str], text: str) -> None:
    assert value_text(names) == text
    assert eval(text) == names


@pytest.mark.parametrize("count", [2, 200])
def test_a_long_call_has_lines_of_100_characters(count: int) -> None:
    cuts = [f"model.layers.{number * number}" for number in range(count)]
    given: dict[str, Any] = {"num_microbatches": 8, "pipeline_cuts": cuts}

    source = call("made = dict", [], given)

    names: dict[str, Any] = {}
    exec(source, names)
    assert names["made"] == given
    assert max(map(len, source.splitlines())) <= 100
    assert (count > 2) == ("\n" in source)
