"""The table of devices, and an accelerator with its calls recorded."""

import time
from typing import Any

import pytest
import torch

from nxdpp.devices import accelerator
from nxdpp.devices.accelerator import Accelerator
from nxdpp.devices.device import Device
from nxdpp.devices.kinds import device_of, kind_of
from nxdpp.devices.xla import XlaDevice

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


class _Event:
    """An event of a device whose clock is ahead of nothing: it gets its time when it is recorded."""

    calls: list[str] = []

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert device == CUDA
        self.timed = enable_timing

    def record(self) -> None:
        self.at = time.perf_counter_ns()
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("wait")

    def elapsed_time(self, other: "_Event") -> float:
        assert self.timed
        assert other.timed
        return (other.at - self.at) / 1e6


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of CUDA, in order."""
    _Event.calls = []
    monkeypatch.setattr(torch, "Event", _Event)
    waited = lambda device: _Event.calls.append(f"synchronize {device}")  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "synchronize", waited)
    return _Event.calls


def test_the_kind_of_each_device() -> None:
    found = {name: kind_of(name) for name in ("cpu", "meta", "xla", "cuda", "xpu", "mps", "privateuseone")}
    assert found == {
        "cpu": (Device, "gloo"),
        "meta": (Device, "gloo"),
        "xla": (XlaDevice, "gloo"),
        "cuda": (Accelerator, "nccl"),
        "xpu": (Accelerator, "xccl"),
        # Types without a backend of their own.
        "mps": (Accelerator, "gloo"),
        "privateuseone": (Accelerator, "gloo"),
    }
    assert type(device_of(CPU)) is Device
    assert type(device_of(CUDA)) is Accelerator


def test_stamps_on_cuda_wait_only_when_they_are_read(calls: list[str]) -> None:
    device = device_of(CUDA)
    start, end = device.stamp(), device.stamp()
    assert calls == ["record", "record"]
    assert device.between(start, end) == end.at - start.at
    assert calls == ["record", "record", "wait"]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that were made in pinned memory, which is other memory here."""
    made: list[torch.Tensor] = []
    empty_like = torch.empty_like

    def pinned_like(tensor: torch.Tensor, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        found = empty_like(tensor, **given)
        if pin_memory:
            made.append(found)
        return found

    monkeypatch.setattr(torch, "empty_like", pinned_like)
    monkeypatch.setattr(accelerator, "_has_pinned_memory", lambda kind: True)
    return made


def test_a_copy_to_the_host_waits_only_when_it_is_read(calls: list[str], pinned: list[torch.Tensor]) -> None:
    copied = device_of(CUDA).to_host(torch.arange(3))
    assert calls == ["record"]
    assert copied().tolist() == [0, 1, 2]
    assert calls == ["record", "wait"]
    assert copied() is pinned[0]
    assert device_of(CPU).to_host(torch.arange(3))().tolist() == [0, 1, 2]


@pytest.mark.parametrize("order", [(2, 0, 1)])
def test_a_copy_to_the_host_keeps_strides(
    calls: list[str], pinned: list[torch.Tensor], order: tuple[int, int, int]
) -> None:
    tensor = torch.arange(24).view(2, 3, 4).permute(order)
    copied = device_of(CUDA).to_host(tensor)()
    assert copied.stride() == tensor.stride()
    assert torch.equal(copied, tensor)


@pytest.mark.parametrize(
    "given",
    [
        torch.arange(6).view(2, 3),
        torch.arange(3).expand(4, 3),
        torch.arange(6).unfold(0, 3, 1),
        torch.arange(12).view(3, 4)[:, 1:3],
    ],
    ids=["dense", "expanded", "windows", "part"],
)
def test_a_copy_of_any_input_goes_by_pinned_memory(
    given: torch.Tensor, pinned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    to, expected = torch.Tensor.to, given.clone()
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: to(tensor, CPU, copy=True))
    copied = device_of(CUDA).from_host(given)
    assert len(pinned) == 1
    assert pinned[0].numel() <= given.numel()
    # The caller may change its memory at once, also memory that it has pinned.
    given.as_strided((given.untyped_storage().nbytes() // 8,), (1,), 0).zero_()
    assert torch.equal(copied, expected)
    copied.add_(1)
