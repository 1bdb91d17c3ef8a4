"""Memory that the engine holds during a step, and none after it."""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

MICROBATCHES = 5


def watch_outputs(rank: int) -> list[tuple[list[int], list[int], int]]:
    """Without and with deallocation: sent activations, and their storages, that are alive after each backward, and at
    the end.
    """
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    return [watch(deallocate) for deallocate in (False, True)]


def watch(deallocate: bool) -> tuple[list[int], list[int], int]:
    model = make("llama", layers=3)
    wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, deallocate_pipeline_outputs=deallocate)
    batch = padded_batch(MICROBATCHES)
    sent: list[weakref.ref[torch.Tensor]] = []
    storages: list[StorageWeakRef] = []
    alive: list[int] = []
    stored: list[int] = []
    send, backward = StageRunner.send_activation, StageRunner.backward

    def watching_send(self: StageRunner, microbatch: int, channels: Any, last: bool) -> None:
        # The embeddings, of which later stages need the dtype only, are free.
        assert self._plan.stage or self._plan.sent_metadata
        for kept in (self._made[microbatch], self._in_flight[microbatch].outputs or {}):
            assert not kept.keys() - self._plan.sent
        for name in self._plan.sent:
            value = self._made[microbatch][name]
            sent.append(weakref.ref(value))
            storages.append(StorageWeakRef(value.untyped_storage()))
        send(self, microbatch, channels, last)

    def watching_backward(self: StageRunner, microbatch: int) -> None:
        backward(self, microbatch)
        alive.append(sum(reference() is not None for reference in sent))
        stored.append(sum(not reference.expired() for reference in storages))

    with (
        mock.patch.object(StageRunner, "send_activation", watching_send),
        mock.patch.object(StageRunner, "backward", watching_backward),
    ):
        for _ in range(2):
            # The first step has no limit of sends in flight.
            for seen in (sent, storages, alive, stored):
                seen.clear()
            wrapped.run_train(**batch)
    gc.collect()
    return alive, stored, sum(not reference.expired() for reference in storages)


def test_outputs_live_until_their_backward_or_until_they_are_sent() -> None:
    kept, deallocated = zip(*run_ranks(3, watch_outputs), strict=True)
    # Stage s of 3 has 3 - s microbatches in flight before its first backward, and one fewer after it.
    assert [max(alive) for alive, _, _ in kept[:2]] == [2, 1]
    assert all(max(alive) == 0 for alive, _, _ in deallocated)
    # Sends in flight are held: two a direction.
    assert all(max(stored) <= 2 for _, stored, _ in deallocated)
    assert all(after == 0 for _, _, after in (*kept, *deallocated))


def frozen_first_stage(model: Any) -> None:
    for layer in (model.model.embed_tokens, model.model.layers[0]):
        layer.requires_grad_(False)


def freeze_and_unfreeze(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model, batch = make("llama", layers=2), padded_batch(4)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2)
    for _ in range(2):
        wrapped.run_train(**batch)
        train_in_one_process(whole, batch, 2)
        frozen_first_stage(model)
        frozen_first_stage(whole)
    assert gradient_differences(wrapped, whole) == {}
    # Stage 1 runs either way; unfreezing on stage 0 needs a metadata exchange.
    model = make("llama", layers=2)
    frozen_first_stage(model)
    wrapped = NxDPPModel(model, num_microbatches=2)
    wrapped.run_train(**batch)
    wrapped.requires_grad_(True)
    wrapped.run_train(**batch)


def test_freezing_later_needs_no_refresh_and_unfreezing_is_an_error_with_the_remedy() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, freeze_and_unfreeze)
    assert "refresh()" in str(raised.value)
    assert "stage 0, forward of microbatch 0" in str(raised.value)
