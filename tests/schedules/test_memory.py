"""Peak bytes of a rank over its actions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.memory import peak_bytes
from nxdpp.schedules.simulate import in_flight_peaks
from nxdpp.schedules.written import parse_schedule


@given(st.sampled_from(list(FAMILIES)), st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_equal_bytes_are_the_microbatches_in_flight(name: str, ranks: int, microbatches: int) -> None:
    schedule = FAMILIES[name].build(ranks, microbatches)
    ones = [1.0] * FAMILIES[name].placement(ranks).stages

    assert peak_bytes(schedule, ones, ones) == in_flight_peaks(schedule)


def test_stages_of_different_size_by_hand() -> None:
    schedule = parse_schedule([["0F0", "1F0", "0F1", "1I0", "0I0", "1W0", "1F1", "0W0", "1B1", "0B1"]])

    # 0F0 10, 1F0 110, 0F1 120, 1I0 60, 0I0 54, 1W0 14, 1F1 114, 0W0 110, ...
    assert peak_bytes(schedule, [10, 100], [4, 40]) == [120]
    # 0I0 adds 20: 0F0 10, 1F0 20, 0F1 30, 1I0 30, 0I0 50.
    assert peak_bytes(schedule, [10, 10], [30, 10]) == [50]


def test_a_split_backward_frees_before_its_weight_gradient() -> None:
    """ZB-H1 holds p microbatches on each rank; the last rank delays p - 1 weight-gradients."""
    schedule = FAMILIES["zb-h1"].build(4, 8)

    assert peak_bytes(schedule, [8.0] * 4, [8.0] * 4) == [32] * 4
    assert peak_bytes(schedule, [8.0] * 4, [2.0] * 4) == [32, 26, 20, 14]


@pytest.mark.parametrize(
    ("held", "after_input", "message"),
    [
        ([1.0], [1.0, 1.0], "held has 1 sizes for 2 stages"),
        ([1.0, 1.0], [1.0], "after_input has 1 sizes for 2 stages"),
        ([1.0, -1.0], [1.0, 1.0], "held has a size of -1.0 bytes"),
        ([1.0, 1.0], [float("nan"), 1.0], "after_input has a size of nan bytes"),
    ],
)
def test_invalid_sizes(held: list[float], after_input: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peak_bytes(FAMILIES["1f1b"].build(2, 2), held, after_input)
