"""Pipelines to draw at random: a schedule of any family and size, and what its stages exchange."""

from typing import NamedTuple

from hypothesis import strategies as st

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.lowering import StagePair
from nxdpp.schedules.placement import Placement


class Pipeline(NamedTuple):
    schedule: Schedule
    placement: Placement
    microbatches: int
    edges: frozenset[StagePair]
    trains: bool


def chain(stages: int) -> frozenset[StagePair]:
    """Each stage uses what the one before makes."""
    return frozenset((stage, stage + 1) for stage in range(stages - 1))


@st.composite
def pipelines(draw: st.DrawFn, names: tuple[str, ...] = tuple(FAMILIES)) -> Pipeline:
    """Edges are any, among them chains with some that skip stages; the schedule trains, or is forward only."""
    family = FAMILIES[draw(st.sampled_from(names))]
    placement = family.placement(
        draw(st.integers(1, 6)), draw(st.integers(family.fewest_chunks, family.most_chunks or 3))
    )
    microbatches = draw(st.integers(1, 12))
    possible = [(maker, user) for maker in range(placement.stages) for user in range(maker + 1, placement.stages)]
    edges = draw(st.sets(st.sampled_from(possible), max_size=6)) if possible else set()
    if draw(st.booleans()):
        edges |= chain(placement.stages)
    trains = draw(st.booleans())
    schedule = (
        family.build(placement.ranks, microbatches, placement.chunks)
        if trains
        else forward_only(placement, microbatches)
    )
    return Pipeline(schedule, placement, microbatches, frozenset(edges), trains)
