"""Times and peaks of schedules: the figures of the papers, and times computed by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import simulate
from nxdpp.schedules.written import parse_schedule


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("gpipe", [32] * 8),
        ("looped-bfs", [32] * 8),
        ("1f1b", [8, 7, 6, 5, 4, 3, 2, 1]),
        ("1f1b-eager", [15, 13, 11, 9, 7, 5, 3, 1]),
        ("interleaved", [11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5]),
        ("zb-h1", [8] * 8),
        ("zb1p", [8] * 8),
        ("zb-v", [8] * 8),
        ("dualpipe-v", [8.5] * 8),
        ("v-half", [5] * 8),
        ("v-min", [4] * 8),
    ],
)
def test_peaks_of_eight_ranks_and_32_microbatches(name: str, peaks: list[float]) -> None:
    assert simulate(FAMILIES[name].build(8, 32)).peaks == peaks


@given(
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    times=st.tuples(*[st.integers(0, 5)] * 4),
)
@settings(max_examples=80, deadline=None)
def test_no_action_starts_before_its_inputs(
    name: str, ranks: int, microbatches: int, times: tuple[int, int, int, int]
) -> None:
    """Recomputation of every start time from the spans alone."""
    family = FAMILIES[name]
    placement = family.placement(ranks)
    transfer = times[3]

    timeline = simulate(family.build(ranks, microbatches), *times)

    ends = {span.action[:3]: span.end for rank in timeline.spans for span in rank}
    for rank in timeline.spans:
        clock = 0.0
        for span in rank:
            stage, kind, microbatch, _ = span.action
            needed = [clock]
            step = {"F": -1, "B": 1, "I": 1}.get(kind.value, 0)
            # A full backward may follow an input-gradient, and the other way round.
            kinds = (kind,) if step < 0 else (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
            for made in (key for each in kinds if (key := (stage + step, each, microbatch)) in ends and step):
                moved = transfer if placement.rank_of(stage) != placement.rank_of(stage + step) else 0
                needed.append(ends[made] + moved)
            assert span.start == max(needed)
            clock = span.end
            assert clock <= timeline.makespan
    assert timeline.makespan == max(ends.values())


def test_times_of_each_stage_by_hand() -> None:
    schedule = parse_schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1I0", "1F1", "1W0", "1B1"]])

    timeline = simulate(schedule, forward=[1, 4], input_gradient=[2, 3], weight_gradient=[1, 5], transfer=[10, 7])

    assert [(str(span.action), span.start, span.end) for span in timeline.spans[0]] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0B0", 28, 31),
        ("0B1", 45, 48),
    ]
    assert [(str(span.action), span.start, span.end) for span in timeline.spans[1]] == [
        ("1F0", 11, 15),
        ("1I0", 15, 18),
        ("1F1", 18, 22),
        ("1W0", 22, 27),
        ("1B1", 27, 35),
    ]
    assert timeline.makespan == 48
    assert timeline.bubbles == [1 - 8 / 48, 1 - 24 / 48]
    assert timeline.peaks == [2, 2]


def test_one_more_forward_a_hop_hides_the_transfer() -> None:
    """Plain 1F1B takes F + B + 2 (p - 1) / p transfers a microbatch, the eager schedule F + B."""

    def per_microbatch(name: str) -> float:
        long, short = (simulate(FAMILIES[name].build(4, m), transfer=0.5).makespan for m in (32, 24))
        return (long - short) / 8

    assert per_microbatch("1f1b") == 3 + 2 * 3 / 4 * 0.5
    assert per_microbatch("1f1b-eager") == 3


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"forward": [1, 2, 3]}, "forward has 3 times for 2 stages"),
        ({"input_gradient": [1, float("inf")]}, "input_gradient=inf must be a finite number"),
    ],
)
def test_invalid_times(times: dict[str, float | list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(FAMILIES["1f1b"].build(2, 2), **times)
