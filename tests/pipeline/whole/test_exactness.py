"""Exactness: loss and every gradient equal those of one process, bit for bit."""

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

# Fewer microbatches than stages, as many, and more.
MICROBATCHES = {1: (1, 2, 5), 2: (1, 2, 6), 3: (2, 3, 7), 4: (3, 4, 8)}
# A tie needs two stages; on three, the other models are as on two and on four.
MORE = [(1, "tied_llama"), (1, "gpt2"), (3, "llama"), (3, "gpt2")]
TIED = {
    "tied_llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "lm_head.weight"},
    "bert": {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"},
}


def check_one_step(model_name: str, count: int) -> tuple[bool, dict[str, float | None], int]:
    model = make(model_name)
    whole = reference(model)
    batch = padded_batch(2 * count)
    wrapped = NxDPPModel(model, num_microbatches=count)
    wrapped.move_model_to_device()
    loss = wrapped.run_train(**batch)
    losses = train_in_one_process(whole, batch, count)
    if wrapped.holds_last_stage:
        same_loss = isinstance(loss, torch.Tensor) and torch.equal(loss, torch.stack(losses).mean())
    else:
        same_loss = loss is None
    return same_loss, gradient_differences(wrapped, whole), len(list(wrapped.local_parameters()))


def steps_of(rank: int, stages: int, model_name: str) -> list[tuple[bool, dict[str, float | None], int]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    results = [check_one_step(model_name, count) for count in MICROBATCHES[stages]]
    parallel_state.destroy_model_parallel()
    return results


@pytest.mark.parametrize(
    ("stages", "model_name"),
    [
        pytest.param(stages, name, marks=pytest.mark.sweep if (stages, name) in MORE else ())
        for stages in MICROBATCHES
        for name in ("llama", "tied_llama", "gpt2")
    ],
)
def test_every_number_is_that_of_one_process(stages: int, model_name: str) -> None:
    check_ranks(run_ranks(stages, steps_of, stages, model_name), stages, model_name)


@pytest.mark.parametrize("model_name", ["qwen3", "mixtral", "bert"])
def test_other_models(model_name: str) -> None:
    check_ranks(run_ranks(4, steps_of, 4, model_name), 4, model_name)


def check_ranks(ranks: list[list[tuple[bool, dict[str, float | None], int]]], stages: int, model_name: str) -> None:
    for rank, steps in enumerate(ranks):
        for count, (same_loss, differences, parameters) in zip(MICROBATCHES[stages], steps, strict=True):
            place = f"rank {rank} of {stages}, {count} microbatches"
            assert parameters > 0, place
            assert same_loss, place
            tied = {name: d for name, d in differences.items() if stages > 1 and name in TIED.get(model_name, ())}
            assert differences == tied, place
            # The two gradients of a tied weight are summed in another order.
            assert all(distance is not None and distance < 1e-6 for distance in tied.values()), place
