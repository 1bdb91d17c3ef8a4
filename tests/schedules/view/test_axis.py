"""Steps and numbers of the time axis."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxdpp.schedules.view.axis import number, round_steps, tick_step


@pytest.mark.parametrize(
    ("at_least", "steps"),
    [(1, [1, 2, 5, 10]), (0.3, [0.5, 1, 2, 5]), (7, [10, 20, 50, 100]), (0.02, [0.02, 0.05, 0.1, 0.2])],
)
def test_steps_are_round(at_least: float, steps: list[float]) -> None:
    assert list(islice(round_steps(at_least), 4)) == steps


@pytest.mark.parametrize(
    ("time", "text"),
    [(0, "0"), (12.5, "12.5"), (3 * 0.1, "0.3"), (1e6 / 3, "333333"), (123456789.0, "123456789"), (2e-6, "0.000002")],
)
def test_numbers_have_no_exponent(time: float, text: str) -> None:
    assert number(time) == text


@given(makespan=st.floats(1e-3, 1e9), columns=st.integers(1, 100_000))
def test_the_numbers_of_ticks_do_not_touch(makespan: float, columns: int) -> None:
    scale = columns / makespan

    step = tick_step(makespan, scale, 1, 2)

    for tick in range(min(1000, int(makespan / step) + 1)):
        assert len(number(tick * step)) + 1 < step * scale + 1e-6
