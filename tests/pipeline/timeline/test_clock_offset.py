"""Clocks of one machine are one clock; clocks that differ are told apart."""

import time

from nxdpp import parallel_state
from nxdpp.pipeline.timeline import clock_offset
from nxdpp.pipeline.timeline.clock_offset import offset, offset_to_first
from tests.support.run_ranks import run_ranks


def test_a_difference_within_the_round_trip_is_none() -> None:
    assert offset(took=100, theirs=1050, ours=1000) == 0
    assert offset(took=100, theirs=1051, ours=1000) == 51
    assert offset(took=100, theirs=10, ours=1000) == -990


class _Shifted:
    """``time``, on a rank whose clock is behind."""

    def __init__(self, behind: int) -> None:
        self._behind = behind

    def perf_counter_ns(self) -> int:
        return time.perf_counter_ns() - self._behind


def measure(rank: int) -> tuple[int, int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    group = parallel_state.get_pipeline_control_group()
    same = offset_to_first(group)
    setattr(clock_offset, "time", _Shifted(rank * 10**12))  # noqa: B010
    return same, offset_to_first(group)


def test_offsets_of_processes() -> None:
    for rank, (same, shifted) in enumerate(run_ranks(3, measure)):
        assert same == 0
        # Wrong by no more than half of the quickest of five round trips.
        assert abs(shifted - rank * 10**12) < 10**8
