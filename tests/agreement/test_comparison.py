"""Comparison over one group, over nested groups, over all ranks, and over ranks with the same mates."""

from typing import Any

from nxdpp import parallel_state
from nxdpp.agreement.comparison import unequal
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
