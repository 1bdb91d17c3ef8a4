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
from nxdpp.schedules.placement import Placement
from tests.schedules.pipelines import Pipeline, chain, pipelines


@given(pipelines(), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_every_family_ends_with_as_many_sends_in_flight_as_it_needs(pipeline: Pipeline, ahead: int) -> None:
    lowered = lower(pipeline.schedule, pipeline.edges, ahead)

    in_flight = sends_in_flight(lowered, pipeline.edges)

    check_lowered(lowered, pipeline.edges, in_flight)
    if in_flight:
        with pytest.raises(ScheduleError, match=f"deadlock.* with {in_flight - 1} sends in flight"):
            check_lowered(lowered, pipeline.edges, in_flight - 1)


@given(st.sampled_from(["gpipe", "1f1b", "1f1b-eager", "zb-h1"]), st.integers(1, 8), st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_a_chain_of_one_stage_a_rank_could_wait_for_each_send(name: str, ranks: int, microbatches: int) -> None:
    assert sends_in_flight(lower(FAMILIES[name].build(ranks, microbatches), chain(ranks)), chain(ranks)) == 0


@pytest.mark.parametrize(
    ("name", "most"),
    [("interleaved", 1), ("looped-bfs", 0), ("zb1p", 4), ("zb-v", 1), ("dualpipe-v", 1), ("v-half", 1), ("v-min", 1)],
)
def test_sends_in_flight_with_two_chunks(name: str, most: int) -> None:
    edges = chain(16)

    assert [sends_in_flight(lower(FAMILIES[name].build(8, m), edges), edges) <= most for m in (1, 8, 9, 16)] == [
        True
    ] * 4


def test_a_tensor_that_skips_six_stages_needs_more_in_flight() -> None:
    """The last stage posts its receives later than the first one sends."""
    edges = chain(8) | {(0, 7)}
    lowered = lower(FAMILIES["1f1b"].build(8, 9), edges)

    with pytest.raises(ScheduleError, match=r"rank 0, action \d+ \(0SEND_F\d+\) waits for rank 7 to post 7RECV_F"):
        check_lowered(lowered, edges, in_flight=2)
    assert sends_in_flight(lowered, edges) > 2


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_receive_that_is_missing(name: str) -> None:
    edges = chain(Placement(2, FAMILIES[name].default_chunks).stages)
    lowered = lower(FAMILIES[name].build(2, 2), edges)
    at = next(at for at, action in enumerate(lowered[1]) if action.kind is ActionKind.RECEIVE_ACTIVATION)
    del lowered[1][at]

    with pytest.raises(ScheduleError, match=r"rank 0, action \d+ \(0SEND_F0.*\) waits for rank 1 to post 1RECV_F0@0"):
        check_lowered(lowered, edges, in_flight=0)


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


@pytest.mark.parametrize("name", FAMILIES)
def test_actions_of_participants_keep_no_rank_waiting(name: str) -> None:
    schedule = FAMILIES[name].build(3, 4)
    edges = chain(1 + max(action.stage for actions in schedule for action in actions))
    lowered = lower(schedule, edges)

    assert sends_in_flight([add(actions, TIES) for actions in lowered], edges) == sends_in_flight(lowered, edges)


def test_a_sum_of_tied_weights_needs_all_of_its_ranks() -> None:
    """Rank 0 comes to it before its second forward, rank 1 after the backward of it."""
    edges = chain(2)
    lowered = [add(actions, TIES) for actions in lower(FAMILIES["1f1b"].build(2, 2), edges)]
    total = lowered[0].pop()
    second = next(at for at, action in enumerate(lowered[0]) if str(action) == "0F1")
    lowered[0].insert(second, total)

    with pytest.raises(ScheduleError, match=r"\(0SUM_TIES1\) waits for rank 1 to come to 1SUM_TIES1"):
        check_lowered(lowered, edges)
