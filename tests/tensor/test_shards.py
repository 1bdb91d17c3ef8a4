"""Rows of DTensors, also with fewer rows than ranks."""

from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from nxdpp import parallel_state
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.tensor.shards import all_rows, first_row, is_divided_by_rows, with_rows_of
from tests.support.run_ranks import run_ranks


class Rows(nn.Module):
    """A parameter of so many rows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(3.0 * count).view(count, 3))


def _few_rows(rank: int) -> dict[int, tuple[int, int]]:
    parallel_state.initialize_model_parallel()
    mesh = init_device_mesh("cpu", (3,))
    found = {}
    for count in (1, 4, 7):
        whole = Rows(count).rows.detach()
        module = Rows(count)
        fully_shard(module, mesh=mesh)
        rows: torch.Tensor = module.rows
        assert isinstance(rows, DTensor)
        assert is_divided_by_rows(rows)
        # Rows of CPUOffloadPolicy go to the mesh's device, whose backend has the collective.
        with patch.object(DTensor, "to", return_value=rows) as moved:
            assert torch.equal(all_rows(rows), whole)
        moved.assert_called_once_with(mesh.device_type)
        assert torch.equal(local_rows(with_rows_of(whole, rows)), local_rows(rows))
        found[count] = first_row(rows), len(local_rows(rows))
    assert not is_divided_by_rows(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(1)]))
    assert not is_divided_by_rows(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
    assert all_rows(whole) is whole
    return found


def test_fewer_rows_than_ranks() -> None:
    places = run_ranks(3, _few_rows)
    assert [found[7] for found in places] == [(0, 3), (3, 3), (6, 1)]
    assert [found[4] for found in places] == [(0, 2), (2, 2), (4, 0)]
    assert [found[1] for found in places] == [(0, 1), (1, 0), (1, 0)]
