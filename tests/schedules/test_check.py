"""Rules of a schedule, and the messages for broken ones."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import Action, ActionKind, Schedule, parse_action
from nxdpp.schedules.check import ScheduleError, ScheduleSize, check
from nxdpp.schedules.families.registry import FAMILIES

GOOD = ["0F0 0F1 0B0 0I1 0W1", "1F0 1B0 1F1 1I1 1W1"]


def _schedule(*ranks: str) -> Schedule:
    return [[parse_action(text) for text in rank.split()] for rank in ranks]


def test_full_and_split_backwards_may_be_mixed() -> None:
    assert check(_schedule(*GOOD)) == ScheduleSize(ranks=2, stages=2, microbatches=2, trains=True)


def test_a_mistyped_microbatch_is_refused_before_memory_is_allocated() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, action 1 \(0F99999999999\): .* no rank has 100000000000 actions"):
        check(_schedule("0F0 0F99999999999 0B0"))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["0F0 0B0 0F1 0B1", "1B0 1F0 1F1 1B1"], "rank 1, action 0 (1B0): a backward comes after its forward, 1F0."),
        (["0F0 0F0"], "rank 0, action 1 (0F0): it ran before; each stage runs each microbatch once."),
        (["0F0 0I0 0B0"], "rank 0, action 2 (0B0): its input-gradient ran before"),
        (["0F0 0F1 0B0"], "rank 0 lacks 0B1: every forward has its backward (B, or I and W)."),
        (["0F0 0I0"], "rank 0 lacks 0W0: every input-gradient has its weight-gradient."),
        (["0F0 0F1", "1F1"], "rank 1 lacks 1F0: every stage runs every microbatch."),
        (["0F0", "0F1"], "rank 1, action 0 (0F1): stage 0 is on rank 0; a stage is on one rank."),
        ([""], "the schedule is empty"),
    ],
)
def test_each_rule_names_rank_action_and_rule(ranks: list[str], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(_schedule(*ranks))

    assert message in str(caught.value)


def test_a_deadlock() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(_schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))

    assert str(caught.value) == (
        "deadlock: rank 0, action 1 (0B0) waits for 1B0 of rank 1; rank 1, action 1 (1F1) waits for 0F1 of rank 0."
    )


@given(
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 5),
    microbatches=st.integers(2, 8),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None)
def test_a_missing_or_repeated_action_is_found(name: str, ranks: int, microbatches: int, seed: int) -> None:
    schedule = FAMILIES[name].build(ranks, microbatches)
    chance = random.Random(seed)
    rank = chance.randrange(ranks)
    at = chance.randrange(len(schedule[rank]))
    repeated = [list(actions) for actions in schedule]
    repeated[rank].append(schedule[rank][at])
    missing = [list(actions) for actions in schedule]
    del missing[rank][at]

    for broken in (repeated, missing):
        with pytest.raises(ScheduleError):
            check(broken)


@given(st.permutations(range(8)), st.permutations(range(8)))
@settings(max_examples=150)
def test_an_order_is_refused_if_and_only_if_it_has_a_cycle(first: list[int], second: list[int]) -> None:
    """Comparison with a search for a cycle in the dependency graph."""
    actions = [parse_action(text) for text in ("0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1")]
    ranks = [[actions[i] for i in order if actions[i].stage == stage] for stage, order in enumerate((first, second))]
    after = {(a, b) for rank in ranks for a, b in pairwise(rank)}
    after |= {(parse_action(a), parse_action(b)) for a, b in (("0F0", "1F0"), ("0F1", "1F1"))}
    after |= {(parse_action(a), parse_action(b)) for a, b in (("1B0", "0B0"), ("1B1", "0B1"))}
    after |= {(parse_action(f"{s}F{m}"), parse_action(f"{s}B{m}")) for s in (0, 1) for m in (0, 1)}
    left = set(actions)
    while free := {a for a in left if not any(b == a and c in left for c, b in after)}:
        left -= free

    if left:
        with pytest.raises(ScheduleError):
            check(ranks)
    else:
        check(ranks)


# With a gather in the first forward of the stage, and a reduction in its last backward.
ADDED = "0GATHER0 0F0 0GATHERED0 0F1 0B0 0AVERAGE1 0REDUCE1 0B1 0RESHARD1 0AVERAGED1 0SUM_TIES1"


def _added(text: str) -> Schedule:
    kinds = {kind.value: kind for kind in ActionKind}
    return [[Action(int(each[0]), kinds[each[1:-1]], int(each[-1])) for each in text.split()]]


def test_actions_of_participants_are_checked_with_the_ones_of_stages() -> None:
    assert check(_added(ADDED)) == ScheduleSize(ranks=1, stages=1, microbatches=2, trains=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0 0GATHER0 0F1 0GATHERED0 0B0 0B1",
            "action 0 (0F0): its parameters are not whole; 0GATHER comes before it.",
        ),
        (
            "0F0 0F1 0AVERAGE0 0B0 0AVERAGED0 0B1",
            "action 2 (0AVERAGE0): 2 backwards come after it; a sum is of all of them.",
        ),
        ("0F0 0B0 0AVERAGED0", "action 2 (0AVERAGED0): no exchange of stage 0 has begun."),
    ],
)
def test_gathers_come_before_and_sums_after_what_they_are_of(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(_added(text))

    assert f"rank 0, {message}" in str(caught.value)
