"""Memory of a device: an equal part of the host's without CUDA."""

import os

import pytest

import nxdpp
from nxdpp.devices import cuda


def test_ranks_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = nxdpp.device_memory()
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert nxdpp.device_memory() == whole // 4


def test_a_cuda_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find", lambda: cuda.CudaProbe(2))
    monkeypatch.setattr(cuda, "total_memory", lambda index: 80 * 10**9 + index)
    assert nxdpp.device_memory() == 80 * 10**9
