"""The interface of each device: the CPU, and CUDA with its calls recorded."""

import time
from types import SimpleNamespace

import pytest
import torch

from nxdpp.devices.cuda import CudaDevice
from nxdpp.devices.device import Device
from nxdpp.devices.kinds import device_of

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


class _Event:
    """An event of a device whose clock is ahead of nothing: it gets its time when it is recorded."""

    calls: list[str] = []

    def __init__(self, enable_timing: bool = False) -> None:
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
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: _Event.calls.append(f"synchronize {device}"))
    return _Event.calls


def test_the_kind_of_each_device() -> None:
    assert type(device_of(CPU)) is Device
    assert type(device_of(CUDA)) is CudaDevice
    assert type(device_of(torch.device("meta"))) is Device


def test_stamps_on_cuda_wait_only_when_they_are_read(calls: list[str]) -> None:
    device = device_of(CUDA)
    start, end = device.stamp(), device.stamp()
    assert calls == ["record", "record"]
    assert device.between(start, end) == end.at - start.at
    assert calls == ["record", "record", "wait"]


def test_a_copy_to_the_host_waits_only_when_it_is_read(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **given: empty(*size, **given) if pin_memory else None
    )
    copied = device_of(CUDA).to_host(torch.arange(3))
    assert calls == ["record"]
    assert copied().tolist() == [0, 1, 2]
    assert calls == ["record", "wait"]
    assert device_of(CPU).to_host(torch.arange(3))().tolist() == [0, 1, 2]


def test_the_origin_waits_for_the_device(calls: list[str]) -> None:
    _, at = device_of(CUDA).origin()
    assert calls == ["synchronize cuda:1", "record", "wait"]
    assert 0 <= time.perf_counter_ns() - at < 60e9


def test_the_random_state_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {CUDA: torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.__setitem__(device, state))
    device = device_of(CUDA)
    before = device.random_state()
    states[CUDA] = torch.zeros(16, dtype=torch.uint8)
    device.set_random_state(before)
    assert states[CUDA].tolist() == list(range(16))
    assert device_of(CPU).random_state() == b""


def test_a_device_without_an_interface_is_synchronised_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(synchronize=waited.append))
    device_of(CPU).synchronize()
    device_of(torch.device("xpu", 0)).synchronize()
    assert waited == [torch.device("xpu", 0)]
