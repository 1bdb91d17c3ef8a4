"""Placements of stages on ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxdpp.schedules.placement import ListedPlacement, Placement


def test_the_drawing_in_the_module() -> None:
    assert [Placement(4, 2).stages_of(rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [Placement(4, 2, v_shaped=True).stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@given(st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_each_stage_is_on_one_rank_and_each_rank_has_equally_many(ranks: int, chunks: int, v_shaped: bool) -> None:
    placement = Placement(ranks, chunks, v_shaped)

    assert sorted(stage for rank in range(ranks) for stage in placement.stages_of(rank)) == list(
        range(placement.stages)
    )
    for rank in range(ranks):
        assert len(placement.stages_of(rank)) == chunks
        assert {placement.rank_of(stage) for stage in placement.stages_of(rank)} == {rank}


@pytest.mark.parametrize(("v_shaped", "distances"), [(False, {1, 3}), (True, {0, 1})])
def test_a_v_turns_around_where_a_loop_starts_again(v_shaped: bool, distances: set[int]) -> None:
    placement = Placement(4, 3, v_shaped)

    steps = {abs(placement.rank_of(stage + 1) - placement.rank_of(stage)) for stage in range(11)}

    assert steps == distances


@given(st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_a_listed_placement_equals_the_formula(ranks: int, chunks: int, v_shaped: bool) -> None:
    placement = Placement(ranks, chunks, v_shaped)
    listed = ListedPlacement(tuple(map(placement.rank_of, range(placement.stages))), ranks)

    assert (listed.stages, listed.chunks) == (placement.stages, placement.chunks)
    assert [listed.rank_of(stage) for stage in range(listed.stages)] == list(listed.rank_of_stage)
    assert all(listed.stages_of(rank) == placement.stages_of(rank) for rank in range(ranks))


def test_a_list_may_give_ranks_different_numbers_of_stages() -> None:
    listed = ListedPlacement((0, 1, 1, 0, 1), 2)

    assert [listed.stages_of(rank) for rank in range(2)] == [[0, 3], [1, 2, 4]]
    assert listed.chunks == 3
