"""Methods of NeuronZero1Optimizer that scripts call: ``init_zero``, and files of each rank."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer


@pytest.fixture(autouse=True)
def alone() -> object:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def test_loaded_weights_take_the_place_of_the_masters() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD, lr=0.5)
    with torch.no_grad():
        parameter.fill_(2.0)
    optimizer.init_zero()
    parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.step()
    assert parameter.tolist() == [1.875] * 4


def test_the_state_is_that_of_the_file(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.arange(4.0))
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.AdamW, lr=0.5)
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.save_sharded_state_dict(str(tmp_path), 4)
    kept = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    optimizer.step()
    assert not torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], kept)
    optimizer.load_sharded_state_dict(str(tmp_path))
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], kept)
    assert [path.name for path in tmp_path.iterdir()] == ["tp_rank_00_pp_rank_00_dp_rank_00"]
