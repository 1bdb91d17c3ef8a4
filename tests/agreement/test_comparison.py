"""Comparison over one group, over nested groups, over all ranks, and over ranks with the same mates."""

from typing import Any

import torch

from nxdpp import parallel_state
from nxdpp.agreement.comparison import leaf_text, unequal
from tests.support.run_ranks import run_ranks


def compare(rank: int) -> list[Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    tensor, pipeline = parallel_state.get_tensor_control_group(), parallel_state.get_pipeline_control_group()
    assert unequal({"a": (1, "x")}, tensor, pipeline, note=rank) is None
    assert unequal(rank % 2, mates=rank % 2) is None
    found = unequal(rank // 3, tensor, pipeline, note=f"note {rank}")
    assert found is not None
    return [
        (*found, found.names("pipeline rank")),
        unequal(rank // 3, tensor),
        unequal(rank, mates=rank % 2),
        unequal(min(rank, 1)),
    ]


def test_all_ranks_get_the_first_difference() -> None:
    for rank, (nested, of_group, of_mates, of_all) in enumerate(run_ranks(4, compare)):
        names = ("pipeline rank 0 (rank 0)", "pipeline rank 3 (rank 3)")
        assert nested == ((0, 3), (0, 3), (0, 1), ("note 0", "note 3"), names)
        assert of_group == (((0, 1), (2, 3), (0, 1), (None, None)) if rank >= 2 else None)
        assert of_mates == ((0, 2), (0, 2), (0, 2), (None, None))
        assert of_all == ((0, 1), (0, 1), (0, 1), (None, None))


def test_an_input_is_compared_by_its_kind_and_all_of_its_values() -> None:
    long = torch.zeros(5000)
    other = long.clone()
    other[4999] = 1
    assert leaf_text(long) == leaf_text(long.clone()) != leaf_text(other)
    assert leaf_text(long) != leaf_text(long.double())
    assert leaf_text(torch.empty(0, 3)) != leaf_text(torch.empty(0, 4))
    assert [leaf_text(value) for value in (1, True, "a", None, object())] == ["1", "True", "'a'", "None", "object"]
