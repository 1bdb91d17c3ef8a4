"""One wrapped model with one set of inputs after the other, compared each time with the unwrapped model.

A trace is specific to its inputs: a mask or none, its dtype, the mode. Other inputs must not reuse it.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.microbatches.rows import split_inputs
from tests.support.models import gradient_differences, make, padded_batch, reference
from tests.support.run_ranks import run_ranks

MICROBATCHES = 2
ROWS, LENGTH = 4, 10


def batches(width: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Batches with different inputs, shapes and dtypes, each with a description."""
    # Masks.
    whole = padded_batch(ROWS, LENGTH)
    mask = whole["attention_mask"]
    tokens = {name: whole[name] for name in ("input_ids", "labels")}
    yield "a mask", whole
    yield "no mask", tokens
    yield "the mask None", tokens | {"attention_mask": None}
    yield "a mask again", whole
    yield "a mask that hides the beginning", tokens | {"attention_mask": mask.flip(1)}
    window = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-4).expand(ROWS, 1, LENGTH, LENGTH)
    yield "a mask of 4 dimensions", tokens | {"attention_mask": window}
    # Positions.
    whole_rows = torch.arange(LENGTH).expand(ROWS, LENGTH)
    packed = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(ROWS, LENGTH)
    yield "positions", tokens | {"position_ids": whole_rows}
    yield "positions for all rows", tokens | {"position_ids": whole_rows[:1]}
    yield "positions of two sequences in a row", tokens | {"position_ids": packed}
    yield "positions of two sequences in some rows", tokens | {"position_ids": torch.cat([packed[:1], whole_rows[1:]])}
    yield "two sequences in a row and a mask", whole | {"position_ids": packed}
    # Shapes.
    yield "longer", padded_batch(ROWS, 2 * LENGTH)
    yield "two tokens", {name: value[:, :2].contiguous() for name, value in tokens.items()}
    # Embeddings, dtypes and numbers.
    embedded = torch.randn(ROWS, LENGTH, width, generator=torch.Generator().manual_seed(3))
    yield "embeddings", {"inputs_embeds": embedded, "labels": tokens["labels"]}
    yield "embeddings and a mask", {"inputs_embeds": embedded, "labels": tokens["labels"], "attention_mask": mask}
    yield "tokens again", tokens
    yield "tokens of 32 bits", {"input_ids": tokens["input_ids"].int(), "labels": tokens["labels"]}
    yield "a number of tokens", tokens | {"num_items_in_batch": 11}
    yield (
        "no labels to learn from in a row",
        tokens | {"labels": tokens["labels"].index_fill(0, torch.tensor([0]), -100)},
    )


def differences(wrapped: NxDPPModel, whole: Any, inputs: dict[str, Any], amp: bool = False) -> list[str]:
    """Names of losses and gradients that are not bit for bit those of ``whole``, in training and evaluation."""
    context = torch.autocast(torch.empty(0).device.type, torch.bfloat16) if amp else nullcontext()
    losses, evaluated = [], []
    # A loss that the model divides by the number of items is a part of the sum.
    parts = 1 if "num_items_in_batch" in inputs else MICROBATCHES
    with context:
        for microbatch in split_inputs(inputs, MICROBATCHES):
            loss = whole(**microbatch).loss
            losses.append(loss.detach())
            # As torch advises, and a step does.
            with torch.autocast(loss.device.type, enabled=False):
                (loss / parts).backward()
            with torch.no_grad():
                evaluated.append(whole(**microbatch).loss)
        trained, tested = wrapped.run_train(**inputs), wrapped.run_eval(**inputs)
    wrong = []
    if wrapped.holds_last_stage:
        assert isinstance(trained, torch.Tensor)
        wrong += [] if torch.equal(trained, torch.stack(losses).sum() / parts) else ["the loss"]
        wrong += [] if torch.equal(tested, torch.stack(evaluated).sum() / parts) else ["the loss without gradients"]
    wrong += gradient_differences(wrapped, whole)
    wrapped.zero_grad()
    whole.zero_grad()
    return wrong


def one_after_the_other(rank: int) -> dict[str, list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make("llama")
    # With a cache, the unwrapped model does not separate the sequences of packed positions.
    model.config.use_cache = False
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES)
    wrong = {}
    for step, (description, inputs) in enumerate(batches(model.config.hidden_size)):
        for training in (True, False, True) if step < 2 else (step % 2 == 0,):
            wrapped.train(training)
            whole.train(training)
            wrong[f"{description}, {training}"] = differences(wrapped, whole, inputs)
    batch = padded_batch(ROWS, LENGTH)
    wrong["autocast"] = differences(wrapped, whole, batch, amp=True)
    wrong["after autocast"] = differences(wrapped, whole, batch)
    wrapped.to(torch.bfloat16)
    whole.to(torch.bfloat16)
    wrong["bfloat16"] = differences(wrapped, whole, batch)
    wrong["bfloat16 without a mask"] = differences(wrapped, whole, {k: batch[k] for k in ("input_ids", "labels")})
    wrapped.float()
    whole.float()
    wrong["float32 again"] = differences(wrapped, whole, batch)
    return wrong


def test_all_inputs_are_exact() -> None:
    for wrong in run_ranks(2, one_after_the_other):
        assert {description: parts for description, parts in wrong.items() if parts} == {}


def packed_with_a_cache(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make("llama", use_cache=True)
    wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES)
    batch = padded_batch(ROWS, LENGTH)
    packed = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(ROWS, LENGTH)
    tokens = {name: batch[name] for name in ("input_ids", "labels")} | {"position_ids": packed}
    # Each rank raises it before any send.
    with pytest.raises(ValueError, match=r"several sequences in a row, and config.use_cache is on"):
        wrapped.run_train(**tokens)
    wrapped.run_train(**batch | {"position_ids": packed})
    wrapped.run_train(**tokens | {"position_ids": torch.arange(LENGTH).expand(ROWS, LENGTH)})
    model.config.use_cache = False
    wrapped.zero_grad()
    assert differences(wrapped, make("llama", use_cache=False), tokens) == []


def test_packed_positions_with_a_cache_are_refused() -> None:
    run_ranks(2, packed_with_a_cache)
