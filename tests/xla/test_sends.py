"""Sends of XLA tensors: their values are those of the call, and a peer that dies does not keep a rank alive."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices.daemon_thread import DaemonThread
from nxdpp.devices.kinds import device_of
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import run_xla_ranks


class _Layer(nn.Module):
    """A layer whose parameter has the gradient of its input, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.zeros(1, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor (1, 8)."""
        y: torch.Tensor = self.linear(x + self.added)
        return y.tanh()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def _train(rank: int, device: str | None, slow: bool) -> dict[str, torch.Tensor]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device)
    torch.manual_seed(0)
    model = NxDPPModel(_Model(), transformer_layer_cls=_Layer, num_microbatches=8, schedule="zb-h1", input_names=["x"])
    model.move_model_to_device()
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        if slow:
            submit = DaemonThread.submit
            patch.setattr(DaemonThread, "submit", lambda thread, call: submit(thread, _late(call)))
        for _ in range(2):
            model.run_train(x=inputs)
    return {name: p.grad.cpu() for name, p in model.local_named_parameters() if p.grad is not None}


def _late(call: Callable[[], Any]) -> Callable[[], Any]:
    def late() -> Any:
        time.sleep(0.05)
        return call()

    return late


def _change_while_it_is_copied(rank: int) -> str:
    from nxdpp.devices.host_sends import HostSends, unchanged

    parallel_state.initialize_model_parallel(device="xla")
    device = device_of(parallel_state.local_device())
    tensor = torch.ones(4, device=device.device)
    with pytest.MonkeyPatch.context() as patch:
        submit = DaemonThread.submit
        patch.setattr(DaemonThread, "submit", lambda thread, call: submit(thread, _late(call)))
        started = HostSends(lambda error: None).start(
            unchanged(tensor, device.to_host(tensor)), lambda message: pytest.fail(f"sent {message}")
        )
    tensor.add_(1)
    device.submit()
    with pytest.raises(RuntimeError) as caught:
        started.wait()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def _lose_peer(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla")
    torch.manual_seed(0)
    model = NxDPPModel(_Model(), transformer_layer_cls=_Layer, num_microbatches=8, input_names=["x"])
    model.move_model_to_device()
    if rank == 1:
        submit = DaemonThread.submit

        def die(thread: DaemonThread, call: Callable[[], Any]) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return submit(thread, call)

        DaemonThread.submit = die  # type: ignore[method-assign, assignment]  # replaced for the test
    model.run_train(x=torch.ones(8, 8))


def _fail_in_thread(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla")
    torch.manual_seed(0)
    model = NxDPPModel(_Model(), transformer_layer_cls=_Layer, num_microbatches=8, input_names=["x"])
    model.move_model_to_device()
    if rank == 0:
        from nxdpp.devices.xla import XlaDevice

        def to_host(device: XlaDevice, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            def fail() -> torch.Tensor:
                raise RuntimeError("the device has no memory")

            return fail

        XlaDevice.to_host = to_host  # type: ignore[method-assign, assignment]  # replaced for the test
    model.run_train(x=torch.ones(8, 8))


def test_a_gradient_that_is_a_parameters_too_is_sent_as_it_was_at_the_call() -> None:
    on_cpu = run_ranks(2, _train, None, False)
    on_xla = run_xla_ranks(2, _train, "xla", True)
    for cpu, xla in zip(on_cpu, on_xla, strict=True):
        torch.testing.assert_close(xla, cpu, rtol=0, atol=1e-6)


def test_a_change_in_place_before_the_copy_is_refused() -> None:
    (message,) = run_xla_ranks(1, _change_while_it_is_copied)
    assert "a tensor of shape [4] was changed in place while it was copied" in message


def test_a_killed_peer_ends_the_others_in_bounded_time() -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1: died: killed by SIGKILL"):
        run_xla_ranks(2, _lose_peer, timeout=150)
    assert time.monotonic() - begin < 120


def test_an_error_of_the_sending_thread_ends_all_ranks_and_is_the_one_that_is_raised() -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="the device has no memory") as caught:
        run_xla_ranks(2, _fail_in_thread, timeout=150)
    assert time.monotonic() - begin < 120
    assert "in the thread that sends tensors of a device through host memory" in str(caught.value)
