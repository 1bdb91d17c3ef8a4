"""Forward-only schedules on every placement."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.check import check
from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.placement import Placement
from nxdpp.schedules.simulate import simulate


def test_every_stage_runs_its_microbatches_in_order() -> None:
    assert [" ".join(map(str, actions)) for actions in forward_only(Placement(3), 4)] == [
        "0F0 0F1 0F2 0F3",
        "1F0 1F1 1F2 1F3",
        "2F0 2F1 2F2 2F3",
    ]


def test_a_microbatch_that_turns_around_is_not_overtaken() -> None:
    placement = Placement(2, 2, v_shaped=True)

    assert " ".join(map(str, forward_only(placement, 3)[1])) == "1F0 2F0 1F1 2F1 1F2 2F2"


@given(st.builds(Placement, st.integers(1, 16), st.integers(1, 4), st.booleans()), st.integers(1, 64))
@settings(deadline=None)
def test_it_runs_on_every_placement(placement: Placement, microbatches: int) -> None:
    checked = check(forward_only(placement, microbatches))

    assert checked == (placement.ranks, placement.stages, microbatches, False)


@pytest.mark.parametrize("microbatches", [8, 9, 12, 15, 32])
@pytest.mark.parametrize("v_shaped", [False, True])
def test_ranks_wait_for_the_first_and_last_microbatch_alone(v_shaped: bool, microbatches: int) -> None:
    placement = Placement(8, 2, v_shaped)

    timeline = simulate(forward_only(placement, microbatches))

    assert timeline.makespan == 2 * microbatches + (14 if v_shaped else 7)
