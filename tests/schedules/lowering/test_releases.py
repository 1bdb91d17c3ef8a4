"""Releases of sends: after their arrival at any speed of the ranks, and within a bound."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.lowering import Exchanges, matching_receive
from nxdpp.schedules.lowering.releases import releases
from tests.schedules.pipelines import Pipeline, chain, pipelines


def _run_at_random(pipeline: Pipeline, over: list[list[list[Action]]], random: Random) -> None:
    """Run the ranks in a random order and check that each released send has been used."""
    exchanges = Exchanges(pipeline.schedule, pipeline.edges)
    sent: set[Action] = set()
    used: set[Action] = set()
    places = [0] * len(pipeline.schedule)
    while running := [rank for rank, place in enumerate(places) if place < len(pipeline.schedule[rank])]:
        ready = [r for r in running if set(exchanges.receives(pipeline.schedule[r][places[r]])) <= sent]
        assert ready, "a schedule that ends"
        rank = random.choice(ready)
        # In bursts, so that some ranks are far ahead of others.
        for _ in range(random.choice((1, 1, 20))):
            if places[rank] == len(pipeline.schedule[rank]):
                break
            action = pipeline.schedule[rank][places[rank]]
            if not set(exchanges.receives(action)) <= sent:
                break
            used |= set(exchanges.receives(action))
            sent |= {matching_receive(send) for send in exchanges.sends(action)}
            for send in over[rank][places[rank]]:
                assert matching_receive(send) in used, f"rank {rank} lets go of {send} at {action}"
            places[rank] += 1


@given(pipelines(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_released_send_has_been_used(pipeline: Pipeline, seed: int) -> None:
    over = [releases(pipeline.schedule, rank, pipeline.edges) for rank in range(len(pipeline.schedule))]

    exchanges = Exchanges(pipeline.schedule, pipeline.edges)
    for rank, lists in enumerate(over):
        released = [send for each in lists for send in each]
        assert len(lists) == len(pipeline.schedule[rank])
        assert len(released) == len(set(released)), "once"
        assert set(released) <= {send for action in pipeline.schedule[rank] for send in exchanges.sends(action)}
    for attempt in range(3):
        _run_at_random(pipeline, over, Random(seed + attempt))


def _most_held(schedule: Schedule, rank: int, stages: int) -> int:
    """Return the most sends of ``rank`` that are not released."""
    exchanges = Exchanges(schedule, chain(stages))
    held = most = 0
    for action, over in zip(schedule[rank], releases(schedule, rank, chain(stages)), strict=True):
        held += len(exchanges.sends(action))
        most = max(most, held)
        held -= len(over)
    return most


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_held_sends_are_independent_of_the_number_of_microbatches(name: str) -> None:
    family = FAMILIES[name]
    stages = 4 * family.default_chunks

    for rank in range(4):
        held = [_most_held(family.build(4, microbatches), rank, stages) for microbatches in (24, 48)]
        assert held[0] == held[1]
        # The gradient of an activation comes back within the microbatches in flight. These are at most 2 p and one
        # more a stage. As many gradients are sent before the next activation arrives.
        assert held[1] <= 2 * (2 * 4 + 1) * family.default_chunks


def test_a_gradient_is_released_when_the_next_gradient_arrives() -> None:
    """Stage 1 computes its gradient from stage 2's: rank 0 knows at 0B0 that its send after 2B0 has arrived."""
    schedule = FAMILIES["interleaved"].build(2, 1, 2)
    over = dict(zip(schedule[0], releases(schedule, 0, chain(4)), strict=True))

    assert over[Action(0, ActionKind.BACKWARD, 0)] == [Action(2, ActionKind.SEND_GRADIENT, 0, 1)]
    assert over[Action(2, ActionKind.FORWARD, 0)] == [Action(0, ActionKind.SEND_ACTIVATION, 0, 1)]
