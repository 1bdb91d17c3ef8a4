"""Tensors that all replicas need are read by one of them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader
from nxdpp.checkpoint.files.pieces import FileSpan
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, Training
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make


def _llama() -> nn.Module:
    model: nn.Module = make("llama")
    return model


def _bytes_read(rank: int, layout: Layout, path: Path) -> tuple[int, int]:
    """Bytes that this rank reads in a load, and those of its model and optimizer's state."""
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    training = Training(_llama, layout)
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(7))
    training.step({"input_ids": ids, "labels": ids})
    parts = training.model, training.optimizer, training.scheduler
    save_checkpoint(path, str(layout), *parts)
    state = [value for one in training.optimizer.state.values() for value in one.values() if value.ndim]
    tensors = [*training.model.local_state_dict().values(), *state]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    count = 0
    read = ChecksummedReader.read

    def counted(reader: ChecksummedReader, span: FileSpan, start: int, destination: memoryview) -> None:
        nonlocal count
        count += len(destination)
        read(reader, span, start, destination)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChecksummedReader, "read", counted)
        load_checkpoint(path, str(layout), *parts)
    state = [value for one in training.optimizer.state.values() for value in one.values() if value.ndim]
    for tensor, other in zip([*training.model.local_state_dict().values(), *state], expected, strict=True):
        assert torch.equal(tensor, other)
    return count, sum(tensor.nbytes for tensor in expected)


def test_replicas_read_each_tensor_once(tmp_path: Path) -> None:
    counts = run_ranks(2, _bytes_read, Layout(), tmp_path)
    owned = counts[0][1]
    # Each rank reads the states of its generators too, of some kilobytes.
    assert owned <= sum(count for count, _ in counts) < owned + 40_000 < 1.5 * owned
    assert all(count < 0.7 * owned for count, _ in counts)
