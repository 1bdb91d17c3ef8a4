"""Branches that only raise, found in the source of the running code."""

import contextlib
import sys
from collections.abc import Callable
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


def _formats(x: Asked) -> None:
    if x:
        shown = [str(part) for part in (1, 2)]
        message = f"bad {x.truth!r:>10} {', '.join(shown)} {'a' if shown else 'b'}"
        raise ValueError(message + "end {}".format(shown))  # noqa: UP032


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


def _raises_in_loop(x: Asked) -> None:
    for _ in range(2):
        if x:
            raise ValueError("bad")


def _raises_for_either(x: Asked) -> None:
    if x or _Object.count > 3:
        raise ValueError("bad")


_BRANCHES: list[tuple[Callable[[Asked], Any], bool, type[Exception], str]] = [
    (_formats, True, ValueError, ""),
    (_raises_in_else, False, TypeError, "bad"),
    (_raises_from, True, KeyError, "bad"),
    (_asks_bool, True, ValueError, "bad"),
    (_raises_in_loop, True, ValueError, "bad"),
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


def _value(x: Asked) -> Any:
    return x or 1


def _raises_sometimes(x: Asked, really: bool = False) -> int:
    if x:
        if really:
            raise ValueError("bad")
        return 1
    return 2


def _names_between(x: Asked) -> int:
    z = 1
    if x:  # noqa: SIM102
        if (z := 2) > 3:
            raise ValueError("bad")
    return z


@pytest.mark.parametrize(
    "function",
    [_stores, _caught, _finally, _value, _raises_sometimes, _names_between],
)
def test_a_branch_that_does_more_is_not(function: Callable[[Asked], Any]) -> None:
    for truth in (True, False):
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


def test_a_part_of_a_comparison_of_three_values_raises_only_where_it_decides() -> None:
    x = Asked(False)
    _between(x)
    assert x.question is None
    with pytest.raises(ValueError, match="bad"):
        _not_between(x)
    assert x.question is not None
    assert x.question.raises.keys() == {False}


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
