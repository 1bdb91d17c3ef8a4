"""Bytes that ranks hold over a schedule, and microbatches between forward and backward."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.memory import in_flight, peak_bytes
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
        ([1.0], [1.0, 1.0], "held has 1 size for 2 stages"),
        ([1.0, 1.0], [1.0], "after_input has 1 size for 2 stages"),
        ([1.0, -1.0], [1.0, 1.0], "held has a size of -1.0 bytes"),
        ([1.0, 1.0], [float("nan"), 1.0], "after_input has a size of nan bytes"),
    ],
)
def test_invalid_sizes(held: list[float], after_input: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peak_bytes(FAMILIES["1f1b"].build(2, 2), held, after_input)


def test_1f1b_has_one_fewer_on_each_stage() -> None:
    assert in_flight(FAMILIES["1f1b"].build(4, 16)) == [4, 3, 2, 1]
    assert in_flight(FAMILIES["1f1b"].build(4, 2)) == [2, 2, 2, 1]


def test_several_chunks() -> None:
    # rank 0: f0 f1 F0 F1 f2 B0 f3 B1 F2 b0 ...    rank 1: f0 f1 F0 B0 F1 B1 f2 b0 ...    (F, B: the second chunk)
    assert in_flight(FAMILIES["interleaved"].build(2, 4, 2)) == [4, 3, 2, 1]
    assert in_flight(FAMILIES["interleaved"].build(2, 1, 3)) == [1] * 6


def test_a_microbatch_is_in_flight_until_its_weight_gradient() -> None:
    schedule = FAMILIES["zb-v"].build(2, 4)

    # rank 0: f0 f1 f2 F0 I0 W0 F1 I1 W1 f3 i0 w0 F2 ...    rank 1: f0 F0 f1 F1 I0 W0 f2 i0 w0 ...
    assert in_flight(schedule) == [4, 3, 2, 1]
    assert all(peak <= 4 for peak in in_flight_peaks(schedule))


def test_a_written_schedule() -> None:
    second = ["1F0", "2F0", "2B0", "1B0", "1F1", "2F1", "2B1", "1B1"]
    schedule = parse_schedule([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], second])

    assert in_flight(schedule) == [2, 1, 1]
