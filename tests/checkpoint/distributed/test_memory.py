"""Memory: a save needs pieces, an asynchronous save a copy of what it writes, a load a copy where there is room."""

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed import load
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, Training
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks

ALLOWED_BYTES = 100_000_000


class _Taken(NamedTuple):
    """Bytes above those before: peaks of calls, and what stays after ``finalize_checkpoint``."""

    written: int
    held: int
    save: int
    first_copy: int
    second_copy: int
    left: int
    load: int
    load_without_room: int


def _llama() -> LlamaForCausalLM:
    """A Llama of 38 million parameters: 460 MB with the state of its optimizer."""
    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, vocab_size=6144
    )
    return LlamaForCausalLM(config)


def _resident_bytes() -> int:
    """Resident bytes without memory that was freed, which hides what a call takes; the peak begins there."""
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    return resident_bytes()


def _peaks(rank: int, path: Path) -> _Taken:
    """Of two replicas with ZeRO-1."""
    parallel_state.initialize_model_parallel()
    training = Training(_llama, Layout(zero1=True))
    ids = torch.arange(4).view(2, 2)
    training.step({"input_ids": ids, "labels": ids})

    def save(tag: str, is_async: bool = False) -> None:
        save_checkpoint(path, tag, training.model, training.optimizer, async_save=is_async)

    peaks = []
    before = _resident_bytes()
    with pytest.MonkeyPatch.context() as patch:
        # The disk takes no memory.
        patch.setattr(os, "fsync", lambda _: None)
        save("plain")
        peaks.append(peak_bytes() - before)
        for tag in ("copied", "again"):
            _resident_bytes()
            save(tag, is_async=True)
            if tag == "again":
                finalize_checkpoint()
            peaks.append(peak_bytes() - before)
        left = _resident_bytes() - before
    state = [value for one in training.optimizer.state.values() for value in one.values() if value.ndim]
    held = sum(tensor.nbytes for tensor in [*training.model.local_state_dict().values(), *state])
    for free in (2**40, 0):
        before = _resident_bytes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "free_host_memory", lambda free=free: free)
            load_checkpoint(path, "again", training.model, training.optimizer)
        peaks.append(peak_bytes() - before)
    written = sum(file.stat().st_size for file in (path / "again").glob(f"*rank{rank:05d}*"))
    plain, first, second, with_room, without = peaks
    return _Taken(written, held, plain, first, second, left, with_room, without)


def test_a_save_takes_pieces_and_an_asynchronous_save_and_a_load_one_copy(tmp_path: Path) -> None:
    for taken in run_ranks(2, _peaks, tmp_path):
        assert taken.save < ALLOWED_BYTES < taken.written
        assert 0.9 * taken.written < taken.first_copy < taken.written + ALLOWED_BYTES
        # Not two copies: the second save has the memory of the first.
        assert 0.9 * taken.written < taken.second_copy < taken.written + ALLOWED_BYTES
        assert taken.left < ALLOWED_BYTES
        assert taken.load < taken.held + ALLOWED_BYTES
        assert taken.load_without_room < ALLOWED_BYTES < taken.held
