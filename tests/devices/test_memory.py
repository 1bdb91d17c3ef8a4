"""Memory of a device: an equal part of the host's without CUDA; and free memory of the host."""

import os
from pathlib import Path

import pytest
import torch

import nxdpp
from nxdpp.devices import accelerator, memory
from tests.support.process_memory import peak_bytes


def test_ranks_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = nxdpp.device_memory()
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert nxdpp.device_memory() == whole // 4


def test_a_cuda_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "present", lambda: "cuda")
    monkeypatch.setattr(accelerator, "count", lambda kind: 2)
    monkeypatch.setattr(accelerator, "total_memory", lambda device: 80 * 10**9 + device.index)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    # The third process of a host may see one device of its own.
    for local_rank, index in (("", 0), ("1", 1), ("2", 0)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert nxdpp.device_memory() == 80 * 10**9 + index
    monkeypatch.setattr(accelerator, "present", lambda: "mps")
    assert nxdpp.device_memory() < 80 * 10**9


def test_the_most_memory_of_this_process_does_not_fall() -> None:
    before = memory.peak_bytes(torch.device("cpu"))
    torch.ones(1 << 26)
    after = memory.peak_bytes(torch.device("cpu"))
    assert before <= after == peak_bytes()
    assert after >= 1 << 28


def test_the_limit_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    assert memory.free_host_memory() == 500
    (tmp_path / "memory.current").write_text("1300\n")
    assert memory.free_host_memory() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_host_memory() > 1000
