"""No deadlock over any transport."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.additions import SHARDS_ONCE_A_STEP, Addition, Around
from nxdpp.schedules.lowering.transport_rules import GLOO, NCCL, TransportRules
from nxdpp.schedules.written import parse_schedule
from tests.schedules.pipelines import Pipeline, pipelines
from tests.schedules.transport_model.boundaries import chain
from tests.schedules.transport_model.model import Model
from tests.schedules.transport_model.situation import Backend, Situation, Synchronises
from tests.schedules.transport_model.sweep import Case, cases, deadlocks, every_situation
from tests.schedules.transport_model.verdict import backends, find_deadlock, programs

RULES = pytest.mark.parametrize("rules", [GLOO, NCCL], ids=lambda rules: rules.name)


@RULES
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 5), (3, 2), (3, 12), (4, 9)])
def test_every_family_ends(ranks: int, microbatches: int, rules: TransportRules) -> None:
    """In a chain and with skips, in training and evaluation, in the situations that have the waits of all others."""
    assert [text for case in cases(ranks, microbatches, rules) for text in deadlocks(case)] == []


def test_pipelines_of_many_ranks_end() -> None:
    for name, ranks, microbatches in (("zb-v", 16, 15), ("1f1b", 64, 63)):
        assert deadlocks(Case(name, ranks, microbatches, "chain", True, NCCL)) == []


@RULES
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (3, 3)])
def test_every_situation_ends(ranks: int, microbatches: int, rules: TransportRules) -> None:
    """Synchronisation on each single rank and on all, one hardware queue, lazy and eager, first and later steps."""
    assert [text for case in cases(ranks, microbatches, rules) for text in deadlocks(case, every_situation)] == []


SITUATIONS = st.builds(
    Situation,
    first_step=st.booleans(),
    asks=st.booleans(),
    synchronises=st.sampled_from(Synchronises),
    on_rank=st.none() | st.integers(0, 5),
    one_queue=st.booleans(),
)


@given(pipelines(), st.sampled_from([GLOO, NCCL]), SITUATIONS)
@settings(max_examples=100)
def test_random_pipelines_end(pipeline: Pipeline, rules: TransportRules, situation: Situation) -> None:
    ranks = programs(pipeline.schedule, pipeline.edges, rules, pipeline.trains)

    assert find_deadlock(ranks) is None
    for backend in backends(rules):
        Model(ranks, backend, situation).check()


@RULES
def test_a_written_schedule_ends(rules: TransportRules) -> None:
    """The stages of both ranks are out of order, and a tensor skips two."""
    schedule = parse_schedule(
        [
            ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"],
            ["1F0", "1F1", "3F0", "3B0", "3F1", "3B1", "1B0", "1B1"],
        ]
    )

    assert find_deadlock(programs(schedule, {(0, 1), (1, 2), (2, 3), (0, 3)}, rules)) is None


def test_messages_in_another_order_are_taken_for_others() -> None:
    """NCCL matches messages by order. Two receives from one rank are swapped."""
    ranks = Case("1f1b", 2, 2, "chain", True, NCCL).programs()
    actions = list(ranks.ranks[1])
    places = [at for at, action in enumerate(actions) if str(action).startswith("1RECV_F")]
    first, second = places
    actions[first], actions[second] = actions[second], actions[first]
    swapped = ranks._replace(ranks=[ranks.ranks[0], actions])

    with pytest.raises(ValueError, match=r"rank 1 takes 1RECV_F0@0 of rank 0 for 1RECV_F1@0\."):
        Model(swapped, Backend.NCCL_EAGER, Situation()).check()


@RULES
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_exchanges_of_participants_end(name: str, rules: TransportRules) -> None:
    """Each rank gathers and reduces, and all sum tied weights; with one hardware queue too."""
    schedule = FAMILIES[name].build(3, 4)
    edges = chain(1 + max(action.stage for actions in schedule for action in actions))
    additions = [*SHARDS_ONCE_A_STEP, Addition(Around.END, None, ActionKind.SUM_TIES)]

    assert find_deadlock(programs(schedule, edges, rules, additions=additions)) is None


def test_a_sum_that_one_rank_comes_to_early_is_a_deadlock() -> None:
    additions = [Addition(Around.END, None, ActionKind.SUM_TIES)]
    ranks = programs(FAMILIES["1f1b"].build(2, 2), chain(2), NCCL, additions=additions)
    early = [ranks.ranks[0][-1], *ranks.ranks[0][:-1]]

    with pytest.raises(ValueError, match="the sum of tied weights waits for rank 1 "):
        Model(ranks._replace(ranks=[early, ranks.ranks[1]]), Backend.NCCL_EAGER, Situation()).check()
