"""Exactness: loss and every gradient equal those of one process, bit for bit."""

import pytest
import torch

from nxdpp import NxDPPModel, apply_checkpoint, parallel_state
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

CASES: dict[int, dict[str, tuple[int, ...]]] = {
    1: {"llama": (2,)},
    2: {"llama": (1, 2, 6), "tied_llama": (6,)},
    4: {"llama": (3, 8), "tied_llama": (4,), "gpt2": (8,), "qwen3": (4,), "mixtral": (4,), "bert": (4,)},
}
"""By ranks and model the numbers of microbatches: fewer than stages, as many, and more."""
TIED = {
    "tied_llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "lm_head.weight"},
    "bert": {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"},
}


def check(name: str, wrapped: NxDPPModel, batch: dict[str, torch.Tensor], count: int, layers: int = 4) -> None:
    """Compare a step of ``wrapped``, which is made of ``make(name)``, with one process."""
    whole = reference(make(name, layers=layers))
    wrapped.move_model_to_device()
    loss = wrapped.run_train(**batch)
    losses = train_in_one_process(whole, batch, count)
    assert (loss is not None) == wrapped.holds_last_stage, (name, count)
    assert loss is None or (isinstance(loss, torch.Tensor) and torch.equal(loss, torch.stack(losses).mean()))
    differences = gradient_differences(wrapped, whole)
    assert differences.keys() <= TIED.get(name, set()), (name, count, differences)
    # The two gradients of a tied weight are summed in another order.
    assert all(distance is not None and distance < 1e-6 for distance in differences.values()), (name, count)
    assert list(wrapped.local_parameters())


def steps(rank: int, stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    for name, counts in CASES[stages].items():
        for count in counts:
            check(name, NxDPPModel(make(name), num_microbatches=count), padded_batch(2 * count), count)


@pytest.mark.parametrize("stages", CASES)
def test_every_number_is_that_of_one_process(stages: int) -> None:
    run_ranks(stages, steps, stages)


HEAD = {"model.norm.weight", "lm_head.weight"}


def train_head(rank: int) -> None:
    """Cut after the last layer: the last stage has the norm, the head and the loss, without a layer."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    cuts = ["model.layers.0", "model.layers.1"]
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=2, pipeline_cuts=cuts)
    assert wrapped.stage_layers == [[cuts[0]], [cuts[1]], []][rank]
    assert rank < 2 or {name for name, _ in wrapped.local_named_parameters()} == HEAD
    apply_checkpoint(wrapped)
    check("llama", wrapped, padded_batch(4), 2, layers=2)


def test_the_head_alone_trains_exactly() -> None:
    run_ranks(3, train_head)
