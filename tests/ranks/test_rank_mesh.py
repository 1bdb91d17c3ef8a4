"""Places of the ranks in every order of the dimensions."""

from itertools import permutations, product
from typing import Any

import pytest

from nxdpp.ranks.rank_mesh import DIMENSIONS, RankMesh, checked_order

ORDERS = list(permutations(DIMENSIONS))


def test_by_default_tensor_is_innermost_then_data_then_pipeline() -> None:
    mesh = RankMesh(2, 2, 2)
    assert mesh.ranks.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert mesh.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_are_row_major_in_the_order(order: tuple[str, ...]) -> None:
    sizes = 2, 3, 4
    mesh = RankMesh(*sizes, order)
    by_name = dict(zip(DIMENSIONS, sizes, strict=True))
    places = product(*(range(by_name[dimension]) for dimension in order))
    for rank, place in enumerate(places):
        assert mesh.rank_at(**dict(zip(order, place, strict=True))) == rank
    for dimension in DIMENSIONS:
        groups = mesh.groups(dimension)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks.numel()))
        assert groups == sorted(groups)
        assert {len(group) for group in groups} == {by_name[dimension]}
        # A member's index in its group is its index along the dimension.
        for group in groups:
            for index, rank in enumerate(group):
                assert (mesh.ranks == rank).nonzero()[0, DIMENSIONS.index(dimension)] == index


@pytest.mark.parametrize("order", ["pipeline", ("pipeline", "data", "data"), ("pp", "dp", "tp")])
def test_another_order_is_refused(order: Any) -> None:
    with pytest.raises(ValueError, match=r"order=.*must name the dimensions.*default"):
        checked_order(order)
