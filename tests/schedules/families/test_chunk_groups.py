"""Groups of microbatches that pass through all chunks together."""

from hypothesis import given
from hypothesis import strategies as st

from nxdpp.schedules.families.chunk_groups import backward_order, forward_order, group_sizes


@given(st.integers(1, 16), st.integers(1, 200))
def test_group_sizes_are_between_once_and_twice_the_ranks(ranks: int, microbatches: int) -> None:
    sizes = group_sizes(ranks, microbatches)

    assert sum(sizes) == microbatches
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes == [microbatches] if microbatches < ranks else ranks <= sizes[-1] <= sizes[0] < 2 * ranks


def test_the_order_in_the_module() -> None:
    order = forward_order(2, 2, 4)

    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert backward_order(order, 2) == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (1, 3), (0, 2), (0, 3)]
