"""A model built without memory gets the same values however it is cut, and trains like any other."""

from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from tests.distributed import run_ranks
from tests.pipeline.models import MODELS, gradient_differences, make, padded_batch, reference, train_in_one_process

SEED = 5
TIED = {
    "tied_llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "lm_head.weight"},
    "bert": {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"},
}
Values = dict[str, torch.Tensor]


def on_meta(name: str) -> Any:
    torch.manual_seed(1234)
    with torch.device("meta"):
        model = MODELS[name]()
    torch.manual_seed(SEED)
    return model


def initial_values(rank: int, name: str, ranks: int, arguments: dict[str, Any]) -> Values:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    wrapped = NxDPPModel(on_meta(name), num_microbatches=2, **arguments)
    torch.manual_seed(100 + rank)
    wrapped.move_model_to_device()
    assert torch.initial_seed() == 100 + rank
    tensors = [*wrapped.local_named_parameters(remove_duplicate=False), *wrapped.local_named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


@pytest.mark.parametrize("name", list(MODELS))
def test_values_do_not_depend_on_the_partition(name: str) -> None:
    (whole,) = run_ranks(1, initial_values, name, 1, {})
    for ranks, arguments in ((2, {}), (2, {"virtual_pipeline_size": 2}), (4, {})):
        seen = set()
        for part in run_ranks(ranks, initial_values, name, ranks, arguments):
            for key, value in part.items():
                assert torch.equal(value, whole[key]), key
            seen |= set(part)
        assert seen == set(whole)


def train_materialised(rank: int, name: str) -> dict[str, float | None]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(on_meta(name), num_microbatches=2)
    wrapped.move_model_to_device()
    parts: list[Values] = [{}, {}]
    torch.distributed.all_gather_object(parts, wrapped.local_state_dict())
    whole = reference(make(name))
    whole.load_state_dict(parts[0] | parts[1], strict=False)
    batch = padded_batch(4)
    losses = train_in_one_process(whole, batch, 2)
    loss = wrapped.run_train(**batch)
    assert not isinstance(loss, list), "one loss is asked for"
    assert loss is None or torch.equal(loss, torch.stack(losses).mean())
    return gradient_differences(wrapped, whole)


@pytest.mark.parametrize("name", list(MODELS))
def test_it_trains_as_one_process_with_these_values(name: str) -> None:
    for differences in run_ranks(2, train_materialised, name):
        # The gradients of a tied weight are summed in another order.
        assert set(differences) <= TIED.get(name, set())
        assert all(difference is not None and difference < 1e-6 for difference in differences.values())
