"""Ranks that share cores."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.execution import Times
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.shared_execution import shared_run
from nxdpp.schedules.simulate import simulate
from nxdpp.schedules.written import parse_schedule


def _times(data: st.DataObject, stages: int) -> Times:
    each = st.lists(st.integers(0, 9).map(float), min_size=stages, max_size=stages)
    return Times(*(data.draw(each) for _ in range(4)))


@given(data=st.data(), name=st.sampled_from(list(FAMILIES)), ranks=st.integers(1, 5), microbatches=st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_with_a_core_for_each_rank_it_is_the_simulation(
    data: st.DataObject, name: str, ranks: int, microbatches: int
) -> None:
    schedule = FAMILIES[name].build(ranks, microbatches)
    times = _times(data, FAMILIES[name].placement(ranks).stages)

    alone, shared = simulate(schedule, *times), shared_run(schedule, times, ranks)

    assert [[span.action for span in rank] for rank in shared.spans] == schedule
    for spans, others in zip(alone.spans, shared.spans, strict=True):
        assert [span.end for span in others] == pytest.approx([span.end for span in spans])


@given(data=st.data(), name=st.sampled_from(list(FAMILIES)), ranks=st.integers(1, 5), microbatches=st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_one_core_is_never_idle_without_transfers(
    data: st.DataObject, name: str, ranks: int, microbatches: int
) -> None:
    """The makespan is the sum of all actions."""
    schedule = FAMILIES[name].build(ranks, microbatches)
    stages = FAMILIES[name].placement(ranks).stages
    times = _times(data, stages)._replace(transfer=[0.0] * stages)

    work = sum(sum(each) for each in times[:3]) * microbatches

    assert shared_run(schedule, times, 1).makespan == pytest.approx(work)
    assert shared_run(schedule, times, 0.5).makespan == pytest.approx(2 * work)


def test_three_ranks_on_two_cores_by_hand() -> None:
    """Stages 0 to 2 compute a microbatch each; from 2 on, all three share two cores."""
    schedule = parse_schedule([["0F0", "0F1", "0F2"], ["1F0", "1F1", "1F2"], ["2F0", "2F1", "2F2"]])

    timeline = shared_run(schedule, Times([1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3), 2)

    ends = [[span.end for span in rank] for rank in timeline.spans]
    assert ends == [pytest.approx([1, 2, 3.5]), pytest.approx([2, 3.5, 4.5]), pytest.approx([3.5, 4.5, 5.5])]


def test_a_transfer_takes_no_core() -> None:
    schedule = parse_schedule([["0F0", "0F1"], ["1F0", "1F1"]])

    timeline = shared_run(schedule, Times([2.0, 2.0], [0.0] * 2, [0.0] * 2, [3.0, 0.0]), 1)

    # 0F0 0-2, 0F1 2-4, 1F0 5-7, 1F1 7-9.
    assert [[(span.start, span.end) for span in rank] for rank in timeline.spans] == [
        [(0, 2), (2, 4)],
        [(5, 7), (7, 9)],
    ]


def test_arguments() -> None:
    schedule, times = FAMILIES["1f1b"].build(2, 2), Times(*[[1.0] * 2] * 4)

    with pytest.raises(ValueError, match="cores=0 must be a number above 0"):
        shared_run(schedule, times, 0)
    with pytest.raises(ValueError, match="transfer has 1 time for 2 stages"):
        shared_run(schedule, times._replace(transfer=[1.0]), 2)
