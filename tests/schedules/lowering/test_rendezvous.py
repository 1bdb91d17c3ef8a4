"""Deadlock check of lowered schedules under rendezvous semantics."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.additions import SHARDS_ONCE_A_STEP, Addition, Around, add
from nxdpp.schedules.lowering.lowering import lower
from nxdpp.schedules.lowering.rendezvous import check_lowered, sends_in_flight
from tests.schedules.pipelines import Pipeline, chain, pipelines


@given(pipelines(), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_every_family_ends_with_as_many_sends_in_flight_as_it_needs(pipeline: Pipeline, ahead: int) -> None:
    lowered = lower(pipeline.schedule, pipeline.edges, ahead)

    in_flight = sends_in_flight(lowered, pipeline.edges)

    check_lowered(lowered, pipeline.edges, in_flight)
    if in_flight:
        with pytest.raises(ScheduleError, match=f"deadlock.* with {in_flight - 1} sends in flight"):
            check_lowered(lowered, pipeline.edges, in_flight - 1)


def test_a_tensor_that_skips_six_stages_needs_more_in_flight() -> None:
    """The last stage posts its receives later than the first one sends."""
    edges = chain(8) | {(0, 7)}
    lowered = lower(FAMILIES["1f1b"].build(8, 9), edges)

    with pytest.raises(ScheduleError, match=r"rank 0, action \d+ \(0SEND_F\d+\) waits for rank 7 to post 7RECV_F"):
        check_lowered(lowered, edges, in_flight=2)
    assert sends_in_flight(lowered, edges) > 2


def test_compute_actions_in_a_circle() -> None:
    """A deadlock with any number of sends in flight."""
    edges = chain(2)
    lowered = lower(FAMILIES["1f1b"].build(2, 2), edges, posted_ahead=0)
    # Rank 1 runs both forwards before the first backward, rank 0 needs the first gradient before its second forward.
    lowered[0] = [a for a in lowered[0] if a.microbatch == 0] + [a for a in lowered[0] if a.microbatch == 1]
    forwards = [a for a in lowered[1] if a.kind in (ActionKind.FORWARD, ActionKind.RECEIVE_ACTIVATION)]
    lowered[1] = forwards + [a for a in lowered[1] if a not in forwards]

    with pytest.raises(ScheduleError, match=r"rank 0, action 3 \(0B0\) waits for stage 1 to send to rank 0"):
        check_lowered(lowered, edges)


TIES = [*SHARDS_ONCE_A_STEP, Addition(Around.END, None, ActionKind.SUM_TIES)]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_actions_of_participants_keep_no_rank_waiting(name: str) -> None:
    schedule = FAMILIES[name].build(3, 4)
    edges = chain(1 + max(action.stage for actions in schedule for action in actions))
    lowered = lower(schedule, edges)

    assert sends_in_flight([add(actions, TIES) for actions in lowered], edges) == sends_in_flight(lowered, edges)
