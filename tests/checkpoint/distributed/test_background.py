"""Saves whose files a thread writes while the training goes on."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed import save
from nxdpp.checkpoint.files.checksummed_writer import write_checksummed
from nxdpp.checkpoint.files.pieces import FileSpan
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from nxdpp.ranks.faults import background_errors
from tests.checkpoint.distributed.layouts import Layout, Training, tensors_in
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make

_STEPS = 500
"""More than a background thread takes to tell of its error."""


def _llama() -> nn.Module:
    model: nn.Module = make("llama")
    return model


def _batch() -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids}


class _Writer:
    """Writes files when it is released, or fails then."""

    def __init__(self, fails: bool = False) -> None:
        self.released = threading.Event()
        self.fails = fails

    def __call__(self, path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileSpan]:
        assert self.released.wait(30)
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_checksummed(path, tensors)


Save = Callable[..., None]


def _values_of_the_call(training: Training, saved: Save, path: Path, patch: pytest.MonkeyPatch) -> None:
    saved("expected")
    writer = _Writer()
    patch.setattr(save, "write_checksummed", writer)
    saved("now", async_save=True)
    for _ in range(2):
        training.step(_batch())
    assert not (path / "now" / "checkpoint.json").exists()
    writer.released.set()
    finalize_checkpoint()
    expected, found = (tensors_in(path / tag)[1] for tag in ("expected", "now"))
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def _busy(saved: Save, path: Path, patch: pytest.MonkeyPatch) -> None:
    writer = _Writer()
    patch.setattr(save, "write_checksummed", writer)
    saved("first", async_save=True)
    threading.Timer(0.2, writer.released.set).start()
    saved("second", async_save=True)
    assert (path / "first" / "checkpoint.json").exists()
    finalize_checkpoint()
    assert (path / "second" / "checkpoint.json").exists()


def _others_wait(training: Training, saved: Save, path: Path, patch: pytest.MonkeyPatch) -> None:
    """A save that is not asynchronous and a load wait for the save in flight."""
    writer = _Writer()
    first_counts = []

    def written(file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileSpan]:
        if file.parent.name == "now":
            first_counts.append((path / "before" / "checkpoint.json").exists())
            return write_checksummed(file, tensors)
        return writer(file, tensors)

    patch.setattr(save, "write_checksummed", written)
    saved("before", async_save=True)
    threading.Timer(0.2, writer.released.set).start()
    saved("now")
    assert first_counts == [True]
    writer.released.clear()
    saved("last", async_save=True)
    threading.Timer(0.5, writer.released.set).start()
    assert load_checkpoint(path, None, training.model, training.optimizer, training.scheduler) == {"tag": "last"}


def _error_at_a_step(training: Training, saved: Save, path: Path, patch: pytest.MonkeyPatch, rank: int) -> int:
    writer = _Writer(fails=rank == 1)
    patch.setattr(save, "write_checksummed", writer)
    keep, agreed = background_errors.keep, []

    def keeping(error: Exception, all_of: Callable[[int], list[int]]) -> None:
        def of_ranks(begun: int) -> list[int]:
            agreed.append(all_of(begun))
            return agreed[0]

        keep(error, of_ranks)

    patch.setattr(background_errors, "keep", keeping)
    saved("failed", async_save=True)
    message = ""
    for number in range(_STEPS):
        try:
            training.step(_batch())
        except OSError as error:
            message = str(error)
            break
        if number == rank:
            writer.released.set()
    assert "No space left on device" in message
    # Ranks need not begin the same step when the threads fail.
    assert [len(steps) for steps in agreed] == [2]
    assert rank == 1 or "on rank 1" in message
    training.step(_batch())
    patch.undo()
    finalize_checkpoint()
    saved("after", async_save=True)
    finalize_checkpoint()
    assert not (path / "failed" / "checkpoint.json").exists()
    assert load_checkpoint(path, None, training.model, training.optimizer, training.scheduler) == {"tag": "after"}
    return number


def _error_at_the_end(saved: Save, patch: pytest.MonkeyPatch, rank: int) -> None:
    writer = _Writer(fails=rank == 1)
    writer.released.set()
    patch.setattr(save, "write_checksummed", writer)
    saved("at the end", async_save=True)
    with pytest.raises(OSError, match="No space left on device"):
        finalize_checkpoint()
    finalize_checkpoint()


def _cases(rank: int, path: Path) -> int:
    parallel_state.initialize_model_parallel()
    training = Training(_llama, Layout(zero1=True))
    training.step(_batch())

    def saved(tag: str, **options: Any) -> None:
        parts = training.model, training.optimizer, training.scheduler
        save_checkpoint(path, tag, *parts, {"tag": tag}, **options)

    with pytest.MonkeyPatch.context() as patch:
        _values_of_the_call(training, saved, path, patch)
        _busy(saved, path, patch)
        _others_wait(training, saved, path, patch)
        step = _error_at_a_step(training, saved, path, patch, rank)
        _error_at_the_end(saved, patch, rank)
    return step


def test_training_goes_on_while_a_thread_writes(tmp_path: Path) -> None:
    steps = run_ranks(2, _cases, tmp_path)
    assert steps[0] == steps[1] < _STEPS - 1
    assert steps[0] > 1
