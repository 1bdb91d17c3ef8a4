"""Memory that the engine holds during a step, and none after it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

MICROBATCHES = 8


def watch_outputs(rank: int, deallocate: bool) -> tuple[list[int], list[int], int]:
    """Numbers of sent activations and of their storages that are alive after each backward, and at the end."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    model = make("llama")
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, deallocate_pipeline_outputs=deallocate)
    batch = padded_batch(2 * MICROBATCHES)
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

    StageRunner.send_activation = watching_send  # type: ignore[method-assign]
    StageRunner.backward = watching_backward  # type: ignore[method-assign]
    for _ in range(2):
        # The first step has no limit of sends in flight.
        for seen in (sent, storages, alive, stored):
            seen.clear()
        wrapped.run_train(**batch)
        train_in_one_process(whole, batch, MICROBATCHES)
    assert gradient_differences(wrapped, whole) == {}
    gc.collect()
    return alive, stored, sum(not reference.expired() for reference in storages)


def test_outputs_live_until_their_backward() -> None:
    ranks = run_ranks(4, watch_outputs, False)
    # Stage s of 4 has 4 - s microbatches in flight before its first backward, and one fewer after it.
    assert [max(alive) for alive, _, _ in ranks[:3]] == [3, 2, 1]
    assert all(after == 0 for _, _, after in ranks)


def test_deallocated_outputs_do_not_wait_for_their_backward() -> None:
    ranks = run_ranks(4, watch_outputs, True)
    assert all(max(alive) == 0 for alive, _, _ in ranks)
    # Sends in flight are held: two a direction.
    assert all(max(stored) <= 2 for _, stored, _ in ranks)
    assert all(after == 0 for _, _, after in ranks)


def watch_step(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    wrapped = NxDPPModel(make("gpt2", dropout=0.1), num_microbatches=MICROBATCHES)
    batch = padded_batch(2 * MICROBATCHES)
    for _ in range(2):
        # The ranks compare the tied weight in steps 1 and 2.
        wrapped.run_train(**batch)
    wrapped.zero_grad()
    gc.collect()
    before = {id(tensor) for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)}
    wrapped.run_train(**batch)
    wrapped.zero_grad()
    gc.collect()
    tensors = [tensor for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)]
    return [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors if id(tensor) not in before]


@pytest.mark.cpu_only("hashes of inputs on a device are read in the next step")
def test_no_tensor_of_a_step_is_alive_after_it() -> None:
    assert run_ranks(3, watch_step) == [[], [], []]


def count_buffers(rank: int) -> int:
    """The largest number of receives that are posted and not yet waited for."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    wrapped = NxDPPModel(make("llama"), num_microbatches=16)
    batch = padded_batch(16)
    wrapped.run_train(**batch)
    posted = most = 0
    post = Transport.post_receive

    def counting(self: Transport, *args: Any) -> Any:
        nonlocal posted, most
        wait = post(self, *args)
        posted += 1
        most = max(most, posted)

        def arrived() -> torch.Tensor:
            nonlocal posted
            posted -= 1
            return wait()

        return arrived

    Transport.post_receive = counting  # type: ignore[method-assign, assignment]
    wrapped.run_train(**batch)
    return most


def test_buffers_are_held_for_microbatches_in_flight_only() -> None:
    # Two compute actions ahead, and the one that is about to run.
    assert all(1 <= most <= 3 for most in run_ranks(3, count_buffers))


def unfreeze(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    wrapped = NxDPPModel(model, num_microbatches=2)
    wrapped.run_train(**padded_batch(4))
    # Stage 1 runs either way; unfreezing on stage 0 needs a metadata exchange.
    wrapped.requires_grad_(True)
    wrapped.run_train(**padded_batch(4))


def test_unfreezing_without_refresh_is_an_error_with_the_remedy() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, unfreeze)
    assert "refresh()" in str(raised.value)
    assert "stage 0, forward of microbatch 0" in str(raised.value)


def freeze_later(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make("llama")
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2)
    batch = padded_batch(4)
    for _ in range(2):
        wrapped.run_train(**batch)
        train_in_one_process(whole, batch, 2)
        for module in (model, whole):
            for layer in (module.model.embed_tokens, module.model.layers[0], module.model.layers[1]):
                layer.requires_grad_(False)
    assert gradient_differences(wrapped, whole) == {}


def test_freezing_later_needs_no_refresh() -> None:
    run_ranks(2, freeze_later)
