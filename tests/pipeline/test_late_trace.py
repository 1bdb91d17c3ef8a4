"""First trace in the first step, or in ``trace``, over ranks: eager, meta and deferred models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, deferred_init, parallel_state
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import gradient_differences, make, microbatches, padded_batch
from tests.support.plain_models import Block
from tests.support.sized_models import DynamicImages, ShortFirst, images, train_whole, vectors


def train(rank: int, how: str) -> tuple[bool, dict[str, Any], bool]:
    """Two steps of other sizes and an evaluation; return whether losses, gradients and buffers are exact."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    whole: nn.Module = DynamicImages()
    seen: list[list[str]] = []
    wrapped = NxDPPModel(
        DynamicImages() if how == "eager" else deferred_init(DynamicImages),
        Block,
        num_microbatches=2,
        broadcast_and_average_loss=True,
        post_partition_hooks=[lambda model: seen.append(model.pipeline_cuts)],
    )
    assert seen == [["blocks.1"]]
    if how == "traced before a move":
        wrapped.trace(**{name: value.to("meta") for name, value in images(4).items()})
    wrapped.move_model_to_device()
    same = True
    for batch in (images(4), images(8, 8, 12)):
        losses = train_whole(whole, batch, 2)
        same &= torch.equal(torch.stack(losses).mean(), wrapped.run_train(**batch))
    differences = gradient_differences(wrapped, whole)
    buffers = dict(whole.named_buffers())
    same &= all(torch.equal(value, buffers[name]) for name, value in wrapped.local_module.named_buffers())
    wrapped.eval()
    whole.eval()
    with torch.no_grad():
        evaluation = wrapped.run_eval(**images(4))
        expected = torch.stack([whole(**part) for part in microbatches(images(4), 2)]).mean()
    return same, differences, evaluation is None or torch.equal(evaluation, expected)


def refuse_another_order(rank: int) -> tuple[str, bool]:
    """A step of another order is refused before anything is sent: the next one runs."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(ShortFirst(), Block, num_microbatches=2)
    with pytest.raises(ValueError, match=r"Give partition_batch at construction") as caught:
        wrapped.run_train(**vectors(4))
    with pytest.raises(ValueError, match=r"Give partition_batch at construction"):
        wrapped.trace(**vectors(4))
    wrapped.trace(**vectors(8))
    wrapped.run_train(**vectors(8))
    whole = ShortFirst()
    train_whole(whole, vectors(8), 2)
    return str(caught.value), not gradient_differences(wrapped, whole)


def test_a_model_that_asks_for_sizes_trains_exactly_and_another_order_is_refused() -> None:
    cases = [(train, how) for how in ("eager", "traced before a move")]
    (*first, (message, exact)), (*second, other) = run_in_turn(2, *cases, refuse_another_order)
    assert first == second == [(True, {}, True)] * 2
    assert exact
    assert other == (message, True)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    parallel_state.initialize_debug(pipeline_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


def test_trace_needs_no_values_and_no_other_process(two_ranks: None) -> None:
    with torch.device("meta"):
        model = make("llama", layers=2)
    wrapped = NxDPPModel(model, num_microbatches=2)
    wrapped.trace(**padded_batch(4))
    wrapped.eval()
    wrapped.trace(**{name: value.to("meta") for name, value in padded_batch(4).items()})
    with pytest.raises(ValueError, match=r"a batch of 3 .* does not divide"):
        wrapped.trace(**padded_batch(3))
    with pytest.raises(TypeError, match=r"by name, and were given 1 positional"):
        wrapped.trace(torch.ones(4, 4))
