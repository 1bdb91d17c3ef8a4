"""``init`` and ``uninit`` around a training, and the names of ``nnscaler.parallel`` in it."""

import pytest
import torch
import torch.distributed as dist

import nxdpp.nnscaler as nnscaler
from nxdpp import parallel_state
from nxdpp.nnscaler.parallel import ComputeConfig, ParallelModule, build_optimizer, load_sharded_state_dict
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Net
from tests.support.run_ranks import run_ranks


def _trained(rank: int) -> None:
    nnscaler.init()
    nnscaler.init()
    kind = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert (dist.get_rank(), dist.get_backend()) == (rank, dist.Backend.default_device_backend_map[kind.type])
    torch.manual_seed(0)
    whole = Net()
    model = parallelize(whole, {"x": torch.ones(1, WIDTH)}, "dp", ComputeConfig(1, 2, use_async_reducer=True))
    assert isinstance(model, ParallelModule)
    assert parallel_state.local_device().type == kind.type
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.5)
    for number in range(2):
        with nnscaler.sync_grad_when(number == 1):
            model(torch.full((1, WIDTH), float(rank + number))).sum().backward()
    optimizer.step()
    for value in (0.0, 1.0, 1.0, 2.0):
        whole(torch.full((1, WIDTH), value)).sum().backward()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name))
    saved, state = (
        {name: value.clone() for name, value in model.state_dict().items() if name != KEY},
        optimizer.state_dict(),
    )
    with torch.no_grad():
        model.get_parameter("first.weight").zero_()
    load_sharded_state_dict(model, saved, optimizer, state, device=parallel_state.local_device())
    assert torch.equal(model.get_parameter("first.weight"), saved["first.weight"])
    for given in ((optimizer, None), (None, state)):
        with pytest.raises(ValueError, match="given together or not at all"):
            load_sharded_state_dict(model, saved, *given)
    nnscaler.uninit()
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()


KEY = "nxdpp_extra_state"


def test_a_program_of_nnscaler_starts_and_ends() -> None:
    run_ranks(2, _trained)
