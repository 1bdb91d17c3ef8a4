"""Branches that only raise, found in the source of the running code."""

import contextlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxdpp.tracing.code.raising import Question, question_of


class Asked:
    """A value whose truth is asked; it keeps the question and answers ``truth``."""

    def __init__(self, truth: bool = False) -> None:
        self.truth = truth
        self.question: Question | None = None

    def __bool__(self) -> bool:
        self.question = question_of(sys._getframe(1))
        return self.truth

    def __invert__(self) -> "Asked":
        return self

    def __gt__(self, other: int) -> "Asked":
        return self

    def __lt__(self, other: int) -> "Asked":
        return self


class _Object:
    count = 0

    def log(self, text: str) -> None:
        self.count += 1


class CustomError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def _raises(x: Asked) -> None:
    if x:
        raise ValueError("bad")


def _raises_class(x: Asked) -> None:
    if x:
        raise ValueError


def _formats(x: Asked) -> None:
    if x:
        shown = [str(part) for part in (1, 2)]
        message = f"bad {x.truth!r:>10} {', '.join(shown)} {'a' if shown else 'b'}"
        raise ValueError(message + "end {}".format(shown))  # noqa: UP032


def _raises_otherwise(x: Asked) -> int:
    if not x:
        raise TypeError("bad")
    return 1


def _raises_in_else(x: Asked) -> int:
    if x:
        y = 1
    else:
        raise TypeError("bad")
    return y


def _raises_from(x: Asked) -> None:
    if x:
        raise KeyError("bad") from ValueError("inner")


def _asks_bool(x: Asked) -> None:
    if bool(~x):
        raise ValueError("bad")


def _raises_in_with(x: Asked) -> None:
    with contextlib.nullcontext():
        if x:
            raise ValueError("bad")


def _raises_in_loop(x: Asked) -> None:
    for _ in range(2):
        if x:
            raise ValueError("bad")


def _raises_a_local_class(x: Asked) -> None:
    error = KeyError
    if x:
        raise error("bad")


def _with_custom_error(x: Asked) -> None:
    if x:
        raise CustomError(1, 2)


def _raises_for_a_comparison(x: Asked) -> None:
    if x > 3:
        raise ValueError("bad")


def _raises_for_either(x: Asked) -> None:
    if x or _Object.count > 3:
        raise ValueError("bad")


_BRANCHES: list[tuple[Callable[[Asked], Any], bool, type[Exception], str]] = [
    (_raises, True, ValueError, "bad"),
    (_raises_class, True, ValueError, ""),
    (_formats, True, ValueError, ""),
    (_raises_otherwise, False, TypeError, "bad"),
    (_raises_in_else, False, TypeError, "bad"),
    (_raises_from, True, KeyError, "bad"),
    (_asks_bool, True, ValueError, "bad"),
    (_raises_in_with, True, ValueError, "bad"),
    (_raises_in_loop, True, ValueError, "bad"),
    (_raises_a_local_class, True, KeyError, "bad"),
    (_with_custom_error, True, CustomError, ""),
    (_raises_for_a_comparison, True, ValueError, "bad"),
    (_raises_for_either, True, ValueError, "bad"),
]


@pytest.mark.parametrize(("function", "truth", "error", "text"), _BRANCHES)
def test_a_branch_that_only_raises_is_found(
    function: Callable[[Asked], Any], truth: bool, error: type[Exception], text: str
) -> None:
    x = Asked(not truth)
    function(x)
    assert x.question is not None
    assert x.question.raises.keys() == {truth}
    assert (x.question.raises[truth].error, x.question.raises[truth].text) == (error, text)


def _stores(x: Asked) -> None:
    if x:
        _Object.count = 3
        raise ValueError("bad")


def _calls(x: Asked) -> None:
    if x:
        _Object().log("bad")
        raise ValueError("bad")


def _returns(x: Asked) -> int:
    if x:
        return 1
    return 2


def _caught(x: Asked) -> int:
    try:
        if x:
            raise ValueError("bad")
    except ValueError:
        return 1
    return 2


def _finally(x: Asked) -> None:
    try:
        if x:
            raise ValueError("bad")
    finally:
        _Object.count = 1


def _kept(x: Asked) -> bool:
    return not x


def _value(x: Asked) -> Any:
    return x or 1


def _raises_sometimes(x: Asked, really: bool = False) -> int:
    if x:
        if really:
            raise ValueError("bad")
        return 1
    return 2


def _asks_otherwise(x: Asked) -> None:
    if any([x]):
        raise ValueError("bad")


def _writes_a_global(x: Asked) -> None:
    global _written
    if x:
        _written = 1
        raise ValueError("bad")


_written = 0


@pytest.mark.parametrize(
    "function",
    [_stores, _calls, _returns, _caught, _finally, _kept, _value, _raises_sometimes, _asks_otherwise, _writes_a_global],
)
@pytest.mark.parametrize("truth", [True, False])
def test_a_branch_that_does_more_is_not(function: Callable[[Asked], Any], truth: bool) -> None:
    x = Asked(truth)
    with contextlib.suppress(ValueError):
        function(x)
    assert x.question is None or (not x.question.raises and x.question.chained is None)


def _both(x: Asked, y: Asked) -> None:
    if x and y:
        raise ValueError("bad")


def _neither(x: Asked, y: Asked) -> None:
    if not (x or y):
        raise ValueError("bad")


def _nested(x: Asked, y: Asked) -> None:
    if x:  # noqa: SIM102
        if y:
            raise ValueError("bad")


def _stores_between(x: Asked, y: Asked) -> int:
    z = 1
    if x:
        z = 2
        if y:
            raise ValueError("bad")
    return z


def _names_between(x: Asked) -> int:
    z = 1
    if x:  # noqa: SIM102
        if (z := 2) > 3:
            raise ValueError("bad")
    return z


def _between(x: Asked) -> None:
    if 0 < x < 5:
        raise ValueError("bad")


def _not_between(x: Asked) -> None:
    if not 0 < x < 5:
        raise ValueError("bad")


@pytest.mark.parametrize(("function", "truth"), [(_both, True), (_neither, False), (_nested, True)])
def test_a_chain_of_questions_is_followed(function: Callable[[Asked, Asked], Any], truth: bool) -> None:
    x, y = Asked(truth), Asked(not truth)
    function(x, y)
    assert x.question is not None
    assert y.question is not None
    assert not x.question.raises
    assert x.question.chained is truth
    assert y.question.raises.keys() == {truth}


def test_a_chain_in_which_a_variable_is_set_is_not() -> None:
    x = Asked(True)
    _stores_between(x, Asked(False))
    assert x.question is not None
    assert x.question.chained is None


def test_a_chain_in_which_an_expression_sets_a_variable_is_not() -> None:
    x = Asked(True)
    _names_between(x)
    assert x.question is None or (not x.question.raises and x.question.chained is None)


def test_a_part_of_a_comparison_of_three_values_raises_only_where_it_decides() -> None:
    x = Asked(False)
    _between(x)
    assert x.question is None
    with pytest.raises(ValueError, match="bad"):
        _not_between(x)
    assert x.question is not None
    assert x.question.raises.keys() == {False}


def test_an_assertion_is_found(tmp_path: Path) -> None:
    # pytest rewrites the assertions of this file.
    file = tmp_path / "asserting.py"
    file.write_text("def asserts(x):\n    assert x, 'bad'\n")
    space = runpy.run_path(str(file))
    x = Asked(True)
    space["asserts"](x)
    assert x.question is not None
    assert x.question.raises[False].error is AssertionError
    assert x.question.raises[False].text == "bad"


def _truth(x: Asked) -> bool:
    return bool(x)


def _opposite(x: Asked) -> bool:
    return not bool(x)


def test_a_function_that_returns_the_truth_leaves_the_question_to_its_caller() -> None:
    def checked(x: Asked, truth: Callable[[Asked], bool] = _truth) -> Asked:
        if not truth(x):
            raise ValueError("bad")
        return x

    right = checked(Asked(True))
    assert right.question is not None
    assert {truth: each.text for truth, each in right.question.raises.items()} == {False: "bad"}
    assert checked(Asked(False), _opposite).question is None

    asked = Asked(True)
    kept = _truth(asked)
    assert kept
    assert asked.question is None


class _Holding:
    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def __contains__(self, other: object) -> bool:
        return bool(self.asked)


def _of_several(x: Asked) -> None:
    if _truth(x) and _truth(x):
        raise ValueError("bad")


def _of_all(x: Asked) -> None:
    if all(map(_truth, [x])):
        raise ValueError("bad")


def _of_an_object(x: Asked) -> None:
    if 1 not in _Holding(x):
        raise ValueError("bad")


@pytest.mark.parametrize("function", [_of_several, _of_all, _of_an_object])
def test_a_truth_that_goes_through_other_code_is_no_question(function: Callable[[Asked], None]) -> None:
    asked = Asked(True)
    with contextlib.suppress(ValueError):
        function(asked)
    assert asked.question is None


def test_code_without_a_source_has_no_question() -> None:
    space: dict[str, Any] = {}
    exec("def asserts(x):\n    if x:\n        raise ValueError\n", space)
    x = Asked(False)
    space["asserts"](x)
    assert x.question is None
