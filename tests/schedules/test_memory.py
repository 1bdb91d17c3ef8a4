"""Microbatches between forward and backward of a stage."""

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.memory import in_flight
from nxdpp.schedules.simulate import in_flight_peaks
from nxdpp.schedules.written import parse_schedule


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
