"""Checkpoints in loops of users: modes of torch, another directory, tensors that change between saves."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp.checkpoint.distributed import save
from nxdpp.checkpoint.files.checksummed_writer import write_checksummed
from nxdpp.checkpoint.files.pieces import FileSpan
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.small_training import Training, is_same


def test_a_tensor_can_be_resized_between_two_saves(tmp_path: Path) -> None:
    model = nn.Module()
    rows = torch.arange(4.0)
    model.register_buffer("rows", rows)
    for size in (4, 8, 2):
        rows.resize_(size).copy_(torch.arange(size))
        save_checkpoint(tmp_path, size, model, async_save=True)
    finalize_checkpoint()
    for size in (4, 8, 2):
        model.rows = torch.zeros(size)
        load_checkpoint(tmp_path, size, model)
        assert torch.equal(model.rows, torch.arange(float(size)))


def test_the_directory_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    released = threading.Event()

    def slow(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileSpan]:
        assert released.wait(30)
        return write_checksummed(path, tensors)

    monkeypatch.setattr(save, "write_checksummed", slow)
    monkeypatch.chdir(first)
    save_checkpoint("out", "tag", nn.Linear(2, 2), async_save=True)
    monkeypatch.chdir(second)
    released.set()
    finalize_checkpoint()
    assert (first / "out" / "tag" / "checkpoint.json").exists()
    assert not list(second.iterdir())


def test_a_training_goes_on_after_a_load_in_inference_mode(tmp_path: Path) -> None:
    one, other = Training(), Training()
    one.step()
    content = {"tensor": torch.ones(2), "number": torch.tensor(2.0)}
    parts = one.model, one.optimizer, one.scheduler, content
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        save_checkpoint(tmp_path, "tag", *parts)
        found = load_checkpoint(tmp_path, "tag", other.model, other.optimizer, other.scheduler)
    for key, value in content.items():
        assert torch.equal(found[key].add_(0), value)
    assert is_same(one.state(), other.state())
    one.step()
    other.step()
    assert is_same(one.state(), other.state())
