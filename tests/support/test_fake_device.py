"""The fake accelerator computes what the CPU computes, and finds what CUDA would do wrong in silence.

The type is registered for the rest of a process, so each test has a process of its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import fake_device
from tests.support.run_ranks import run_ranks

REASON = fake_device.why_not()
# The first test may build the library.
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
    pytest.mark.cpu_only("its ranks start the fake accelerator"),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    fake_device.built()


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    return run_ranks(1, _installed, function, args)[0]


def _installed(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    fake_device.install()
    return function(*args)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _is_freed_and_given_again() -> None:
    first = torch.ones(1000, device="fake")
    address = first.data_ptr()
    view = first.as_strided((4,), (1,))
    storage = first.untyped_storage()
    assert storage.data_ptr() == address
    del first, view, storage
    second = torch.empty(1000, device="fake")
    assert second.data_ptr() == address
    assert second.isnan().all()


def test_freed_memory_is_not_a_number() -> None:
    in_a_process(_is_freed_and_given_again)


def _runs_late() -> None:
    pinned = torch.zeros(4).pin_memory()
    tensor = torch.ones(4, device="fake")
    pinned.copy_(tensor, non_blocking=True)
    assert not pinned.any()
    torch.accelerator.synchronize()
    assert pinned.all()


def test_kernels_run_late() -> None:
    in_a_process(_runs_late)


def _touches() -> None:
    import ctypes

    tensor = torch.ones(4, device="fake")
    assert ctypes.c_float.from_address(tensor.data_ptr()).value


def test_host_that_touches_memory_faults() -> None:
    with pytest.raises(AssertionError, match="the host touched memory of the device") as caught:
        in_a_process(_touches)
    assert "SIGSEGV" in str(caught.value)
    assert "in _touches" in str(caught.value)


def _misses_waits() -> list[str]:
    compute, side = torch.accelerator.current_stream(), torch.Stream("fake")
    tensor = torch.ones(8, device="fake")

    def read_on_side() -> torch.Tensor:
        with side:
            return tensor * 2

    errors = [error_of(read_on_side)]
    side.wait_stream(compute)
    doubled = read_on_side()
    errors.append(error_of(lambda: doubled.sum()))
    errors.append(error_of(lambda: tensor.zero_()))
    compute.wait_stream(side)
    assert doubled.sum().item() == 16
    # Other bytes of the same memory are no conflict.
    tensor[:4].add_(1)
    with side:
        tensor[4:].add_(1)
    errors.append(error_of(lambda: tensor.sum()))
    torch.accelerator.synchronize()
    assert tensor.sum().item() == 16
    return errors


def test_missing_wait_is_an_error() -> None:
    first, second, third, fourth = in_a_process(_misses_waits)
    assert "stream 1 of fake:0 reads memory in aten::mul" in first
    assert "stream 0 of fake:0 writes it in aten::fill_" in first
    assert "_misses_waits" in first
    assert "read_on_side" in first
    assert "stream 0 of fake:0 reads memory in aten::sum" in second
    assert "stream 0 of fake:0 writes memory in aten::zero_" in third
    assert "aten::sum" in fourth


def _frees_early(records: bool) -> str:
    side = torch.Stream("fake")
    tensor = torch.ones(8, device="fake")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = tensor * 2
    address = tensor.data_ptr()
    if records:
        tensor.record_stream(side)
    del tensor
    error = error_of(lambda: torch.empty(100, device="fake"))
    if records:
        # Another stream has not left the memory.
        assert torch.empty(8, device="fake").data_ptr() != address
        with side:
            assert doubled.sum().item() == 16
    return error


def test_missing_record_stream_is_an_error() -> None:
    error = in_a_process(_frees_early, False)
    assert "32 bytes of stream 0 of fake:0 are given to the next tensor while stream 1 of fake:0 may" in error
    assert "record_stream" in error
    assert in_a_process(_frees_early, True) == "no error"


def _counts_waits() -> None:
    tensor = torch.ones(4, device="fake")
    with fake_device.host_waits() as none:
        (tensor * 2).sum()
        torch.ones(4).pin_memory().to("fake", non_blocking=True)
    assert not none
    for wait in (
        lambda: tensor.sum().item(),
        lambda: tensor.nonzero(),
        lambda: tensor[tensor > 0],
        lambda: torch.equal(tensor, tensor),
        lambda: bool(tensor.any()),
        lambda: tensor.cpu(),
        lambda: torch.ones(4).to("fake"),
        lambda: torch.accelerator.synchronize(),
    ):
        with fake_device.host_waits() as found:
            wait()
        assert len(found) == 1
        assert __file__ in next(iter(found))


def test_waits_of_the_host_are_counted() -> None:
    in_a_process(_counts_waits)
