"""Building of the process groups."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__
from torch.torch_version import TorchVersion

from nxdpp.ranks import parallel_state, process_groups, transfer_groups
from nxdpp.ranks.rank_mesh import RankMesh
from tests.support.run_ranks import run_ranks


def _initialize(rank: int) -> tuple[float, float]:
    """Time at which this rank has its own groups, and time at which it goes on."""
    build = transfer_groups.build_transfer_groups
    times: list[float] = []

    def slowly(*args: Any) -> object:
        groups = build(*args)
        time.sleep(0.5 * rank)
        times.append(time.time())
        return groups

    pytest.MonkeyPatch().setattr(process_groups, "build_transfer_groups", slowly)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    times.append(time.time())
    parallel_state.destroy_model_parallel()
    return times[0], times[1]


def test_no_rank_goes_on_before_all_ranks_have_their_groups() -> None:
    own, goes_on = zip(*run_ranks(3, _initialize), strict=True)
    assert max(own) - min(own) > 0.5
    assert min(goes_on) >= max(own)


def test_other_sizes_or_orders_on_a_rank_are_refused_before_a_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    store = HashStore()
    process_groups._check_same_mesh(RankMesh(2, 2, 1), 2, 1, 1, store)
    process_groups._check_same_mesh(RankMesh(2, 2, 1), 2, 1, 1, store)
    with pytest.raises(
        ValueError, match=r"^rank 1 has called .*_parallel with (\w+)=(.*), and rank 1 with \1="
    ) as caught:
        process_groups._check_same_mesh(RankMesh(4, 1, 1), None, 1, 1, store)
    # Only the argument that differs is shown.
    assert "tensor_model_parallel_size" not in str(caught.value)
    assert "pipeline_model_parallel_size=4" in str(caught.value)


def _initialize_with(rank: int) -> None:
    if rank:
        torch.__version__ = TorchVersion("1.0")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)


def test_a_start_with_other_versions_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"has torch 1\.0\b"):
        run_ranks(2, _initialize_with)
