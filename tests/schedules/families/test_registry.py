"""Every family at every size: validity, order of microbatches, memory limit."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.check import check
from nxdpp.schedules.families.chunk_groups import group_sizes
from nxdpp.schedules.families.registry import FAMILIES, find_family
from nxdpp.schedules.simulate import in_flight_peaks, simulate
from tests.schedules.pipelines import PARTLY_SPLIT, SPLIT, chunks_of

NAMES = [
    "gpipe",
    "1f1b",
    "1f1b-eager",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb1p",
    "zb-v",
    "dualpipe-v",
    "v-half",
    "v-min",
]

# Most chunks that rank r holds, for p ranks, v chunks each, m microbatches.
MOST_IN_FLIGHT = {
    "gpipe": lambda p, v, m, r: m,
    "looped-bfs": lambda p, v, m, r: m * v,
    "1f1b": lambda p, v, m, r: min(m, p - r),
    "1f1b-eager": lambda p, v, m, r: min(m, 2 * (p - r) - 1),
    "interleaved": lambda p, v, m, r: min(
        m * v, (1 if v == 1 else 2) * (p - r - 1) + (v - 1) * group_sizes(p, m)[0] + 1
    ),
    "zb-h1": lambda p, v, m, r: p,
    "zb1p": lambda p, v, m, r: p + (v - 1) * group_sizes(p, m)[0],
    "zb-v": lambda p, v, m, r: 2 * p,
    "dualpipe-v": lambda p, v, m, r: 2 * p + 1,
    "v-half": lambda p, v, m, r: 2 * ((p + 2) // 2),
    "v-min": lambda p, v, m, r: 2 * ((p + 4) // 3),
}


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Draw a family's name, ranks, chunks that it allows, microbatches."""
    name = draw(st.sampled_from(NAMES))
    family = FAMILIES[name]
    chunks = draw(chunks_of(family, 4))
    return name, draw(st.integers(1, 16)), chunks, draw(st.integers(1, 64))


@given(sizes())
@settings(max_examples=200, deadline=None)
def test_every_schedule_of_every_size_runs(size: tuple[str, int, int, int]) -> None:
    """Peaks are within the limit of the family; gradients are summed in the order of the microbatches.

    That is the order of one process, for each action kind on every stage. A full backward is of two kinds.
    """
    name, ranks, chunks, microbatches = size
    family = FAMILIES[name]

    schedule = family.build(ranks, microbatches, chunks)

    checked = check(schedule)
    assert checked == (ranks, ranks * chunks, microbatches, True)
    placement = family.placement(ranks, chunks)
    for rank, actions in enumerate(schedule):
        stages = {action.stage for action in actions}
        assert stages == set(placement.stages_of(rank))
        for stage, kinds_of_sum in product(stages, ("F", "BI", "BW")):
            order = [a.microbatch for a in actions if a.stage == stage and a.kind.value in kinds_of_sum]
            assert order == list(range(microbatches))
    for rank, peak in enumerate(in_flight_peaks(schedule)):
        assert peak <= MOST_IN_FLIGHT[name](ranks, chunks, microbatches, rank)
    if name in PARTLY_SPLIT:
        return
    kinds = {action.kind for actions in schedule for action in actions}
    full = {ActionKind.FORWARD, ActionKind.BACKWARD}
    split = {ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT}
    assert kinds == (split if name in SPLIT else full)


@given(
    st.sampled_from(["interleaved", "looped-bfs", "zb1p"]), st.integers(1, 16), st.integers(2, 4), st.integers(1, 64)
)
@settings(max_examples=60, deadline=None)
def test_odd_numbers_of_microbatches_cost_no_time(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    """With at least p microbatches, a rank waits no longer than if p divides m."""
    waits = {"interleaved": 3 * (ranks - 1), "looped-bfs": 3 * (ranks - 1), "zb1p": ranks - 1}[name]

    timeline = simulate(FAMILIES[name].build(ranks, max(microbatches, ranks), chunks))

    assert timeline.makespan - 3 * chunks * max(microbatches, ranks) == waits


@pytest.mark.parametrize(("name", "plain"), [("interleaved", "1f1b"), ("zb1p", "zb-h1"), ("looped-bfs", "gpipe")])
def test_one_chunk_is_the_family_without_chunks(name: str, plain: str) -> None:
    assert FAMILIES[name].build(5, 7, 1) == FAMILIES[plain].build(5, 7)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks", "message"),
    [
        ("1f1b", 4, 8, 2, "1f1b has 1 stage per rank, not 2"),
        ("zb-v", 4, 8, 1, "zb-v has 2 stages per rank, not 1"),
        ("interleaved", 4, 8, 0, "interleaved has 1 or more stages per rank, not 0"),
        ("gpipe", 0, 8, None, "a pipeline has at least 1 rank, not 0"),
        ("gpipe", 4, 0, None, "a step has at least 1 microbatch, not 0"),
    ],
)
def test_invalid_sizes(name: str, ranks: int, microbatches: int, chunks: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILIES[name].build(ranks, microbatches, chunks)


def test_an_unknown_name() -> None:
    for written, family in (("1f1B", "1f1b"), ("zbv", "zb-v"), ("ZB_H1", "zb-h1"), ("interleave", "interleaved")):
        with pytest.raises(ValueError, match=rf"there is no schedule '{written}' \(did you mean '{family}'\?\)"):
            find_family(written)
        find_family(family)
    with pytest.raises(ValueError, match=r"there is no schedule '2f2b'\. Choose one of gpipe, 1f1b, "):
        find_family("2f2b")
