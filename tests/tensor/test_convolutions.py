"""Convolutions that are divided by channels equal ``torch.nn.Conv2d`` in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.parallel_layers.layers import InputChannelParallelConv2d, OutputChannelParallelConv2d
from nxdpp.ranks import parallel_state
from nxdpp.tensor.padding import whole_of
from tests.support.run_ranks import run_ranks

GEOMETRY: dict[str, Any] = {"kernel_size": (3, 3), "stride": (1, 2), "padding": (1, 1)}


def _compare(build: Callable[[], nn.Module], build_whole: Callable[[], nn.Module], channels: int) -> None:
    """Outputs, gradients, initial values and kept wholes."""
    torch.manual_seed(5)
    whole = build_whole()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    part = build()
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(2, channels, 6, 6, generator=torch.Generator().manual_seed(1))
    given, theirs = (x.clone().requires_grad_() for _ in range(2))
    found, expected = part(given), whole(theirs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for output in (found, expected):
        output.square().mean().backward()
    torch.testing.assert_close(given.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    for name, parameter in part.named_parameters():
        full = whole.get_parameter(name)
        assert parameter.grad is not None
        assert full.grad is not None
        vars(parameter.grad).update(vars(parameter))
        is_whole = vars(parameter)["partition_dim"] < 0
        gradient = parameter.grad if is_whole else whole_of(parameter.grad)
        torch.testing.assert_close(gradient, full.grad, rtol=1e-5, atol=1e-6)
        module, _, last = name.rpartition(".")
        for value in (
            parameter if is_whole else whole_of(parameter),
            getattr(part.get_submodule(module), f"master_{last}"),
        ):
            assert torch.equal(value.cpu(), full.cpu())


def _pair(dilation: int) -> nn.Module:
    first = OutputChannelParallelConv2d(
        3, 8, dilation=dilation, **GEOMETRY, gather_output=False, keep_master_weight=True
    )
    second = InputChannelParallelConv2d(8, 5, 3, input_is_parallel=True, padding=2, keep_master_weight=True)
    return nn.Sequential(first, nn.ReLU(), second)


def _whole_pair(dilation: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, dilation=dilation, **GEOMETRY), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=2))


def _cases(rank: int) -> None:
    for size in (2,):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        for bias in (True, False):
            kept: dict[str, Any] = {"bias": bias, "keep_master_weight": True, "partition_pad": True}
            for channels in (7,):
                output = partial(OutputChannelParallelConv2d, 3, channels, **GEOMETRY, **kept)
                _compare(output, partial(nn.Conv2d, 3, channels, **GEOMETRY, bias=bias), 3)
                inputs = partial(InputChannelParallelConv2d, channels, 3, **GEOMETRY, **kept)
                _compare(inputs, partial(nn.Conv2d, channels, 3, **GEOMETRY, bias=bias), channels)
        for dilation in (2,):
            _compare(partial(_pair, dilation), partial(_whole_pair, dilation), 3)
        parallel_state.destroy_model_parallel()


def test_convolutions_equal_those_of_one_process() -> None:
    run_ranks(2, _cases)


def test_refusals() -> None:
    parallel_state.initialize_debug(tensor_model_parallel_size=4)
    try:
        with pytest.raises(ValueError, match=r"divides 6 channels.* size 4: give a multiple, or partition_pad=True"):
            OutputChannelParallelConv2d(3, 6, 3)
        with pytest.raises(ValueError, match="groups=1 and padding_mode='zeros' only, not 2 and 'zeros'"):
            InputChannelParallelConv2d(8, 8, 3, groups=2)
        with pytest.raises(ValueError, match="not 1 and 'reflect'"):
            InputChannelParallelConv2d(8, 8, 3, padding_mode="reflect")
        with pytest.raises(
            TypeError, match=r"numbers or pairs of numbers, not 'same': .* dilation \* \(kernel_size - 1"
        ):
            OutputChannelParallelConv2d(3, 8, 3, padding="same")  # type: ignore[arg-type]
        assert OutputChannelParallelConv2d(3, 8, 3, device="meta", keep_master_weight=True).master_weight is None
    finally:
        parallel_state.destroy_model_parallel()
