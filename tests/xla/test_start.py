"""Start of ranks on XLA: in nxdpp's world or the caller's, beside scripts that import torch_xla's own backend."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

from nxdpp import parallel_state
from tests.support.xla_ranks import run_xla_ranks


def _start(rank: int) -> list[str]:
    # Scripts of NeuronX Distributed import it; it replaces dist.new_group.
    import torch_xla.distributed.xla_backend  # noqa: F401

    shown = []
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla")
    shown.append(_shown())
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla", backend="gloo")
    for backend, device in ((None, "cpu"), ("gloo", None)):
        try:
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, backend=backend, device=device)
        except RuntimeError as error:
            shown.append(str(error))
    parallel_state.destroy_model_parallel()

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(device="xla")
    shown.append(_shown())
    shown += _refused_collectives()
    # Groups of this rank alone are made at their first use.
    parallel_state.get_context_model_parallel_group()
    parallel_state.get_model_parallel_group()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()

    dist.init_process_group("xla")
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla")
    except ValueError as error:
        shown.append(str(error))
    return shown


def _refused_collectives() -> list[str]:
    """The error of a program's own collective of an XLA tensor, and the result of its remedy."""
    group = parallel_state.get_data_parallel_group()
    tensor = torch.full((2,), 3.0, device=parallel_state.local_device())
    with pytest.raises(RuntimeError, match="a tensor on an XLA device: gloo"):
        dist.broadcast(tensor, 0, group)
    with pytest.raises(RuntimeError, match="a tensor on an XLA device: gloo"):
        dist.all_gather([torch.empty(2), torch.empty(2)], tensor, group)
    with pytest.raises(RuntimeError, match="a tensor on an XLA device: gloo"):
        all_reduce(tensor, "sum", group)
    with pytest.raises(RuntimeError, match="a tensor on an XLA device: gloo"):
        all_gather_tensor(tensor, 0, group)
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(tensor, group=group)
    copied = tensor.cpu()
    dist.all_reduce(copied, group=group)
    return [str(raised.value), f"{copied.to(tensor.device).sum().item():g}"]


def _shown() -> str:
    device, group = parallel_state.local_device(), parallel_state.get_data_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    number = float(torch.ones(2, device=device).sum())
    return f"{device.type} {dist.get_backend(group)} {dist.get_world_size(group)} {number:g}"


def test_the_world_is_nxdpps_or_the_callers_over_gloo() -> None:
    for shown in run_xla_ranks(2, _start):
        own, other_device, other_backend, callers, collective, remedy, refused = shown
        assert "allreduce of a tensor on an XLA device: gloo sends host memory alone" in collective
        assert "tensor.cpu()" in collective
        assert remedy == "12"
        assert (own, callers) == ("xla gloo 1 2", "xla gloo 2 2")
        assert "already initialized on device='xla', which differs from device='cpu': call destroy" in other_device
        assert "already initialized on device='xla', which differs from backend='gloo': call destroy" in other_backend
        assert "leave init_process_group('xla') out, or write 'gloo' there" in refused


def _after_a_backward(rank: int, starts_device: bool) -> str:
    if starts_device:
        import torch_xla

        torch_xla.device()
    torch.ones(3, requires_grad=True).sum().backward()
    try:
        parallel_state.initialize_model_parallel(device="xla")
    except RuntimeError as error:
        return str(error)
    value = torch.ones(3, device=parallel_state.local_device(), requires_grad=True)
    value.sum().backward()
    assert value.grad is not None
    return f"{value.grad.sum().item():g}"


def test_a_backward_before_the_device_is_refused_unless_torch_xla_has_started_it() -> None:
    (refused,) = run_xla_ranks(1, _after_a_backward, False)
    assert "Call initialize_model_parallel(device='xla') before the first backward" in refused
    assert run_xla_ranks(1, _after_a_backward, True) == ["3"]
