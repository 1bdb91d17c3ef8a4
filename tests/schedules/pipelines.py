"""Random pipelines: a schedule of any family and size, and the edges between its stages."""

from typing import NamedTuple

from hypothesis import strategies as st

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.families.family import Family
from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.lowering import StagePair
from nxdpp.schedules.placement import Placement

# Families with input- and weight-gradients as separate actions.
SPLIT = ("zb-h1", "zb1p", "zb-v", "v-half", "v-min")
# Families that have those and full backwards.
PARTLY_SPLIT = ("dualpipe-v",)


class Pipeline(NamedTuple):
    schedule: Schedule
    placement: Placement
    microbatches: int
    edges: frozenset[StagePair]
    trains: bool


def chain(stages: int) -> frozenset[StagePair]:
    """Edges from each stage to the next."""
    return frozenset((stage, stage + 1) for stage in range(stages - 1))


def chunks_of(family: Family, most: int) -> st.SearchStrategy[int]:
    """Numbers of chunks that the family allows, up to ``most``."""
    return st.integers(1, most) if family.any_chunks else st.just(family.default_chunks)


@st.composite
def pipelines(draw: st.DrawFn, names: tuple[str, ...] = tuple(FAMILIES)) -> Pipeline:
    """Draw a training or forward-only schedule, and any edges, also chains with edges that skip stages."""
    family = FAMILIES[draw(st.sampled_from(names))]
    placement = family.placement(draw(st.integers(1, 6)), draw(chunks_of(family, 3)))
    microbatches = draw(st.integers(1, 12))
    possible = [
        (source, destination)
        for source in range(placement.stages)
        for destination in range(source + 1, placement.stages)
    ]
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
