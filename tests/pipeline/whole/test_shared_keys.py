"""Attention layers that share keys and values over stages, compared bit for bit with one process."""

from typing import Any

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from nxdpp import NxDPPModel, apply_checkpoint, parallel_state
from tests.support.models import (
    VOCABULARY,
    gradient_differences,
    microbatches,
    padded_batch,
    reference,
    train_in_one_process,
)
from tests.support.run_ranks import run_ranks

COUNT = 4


def sharing_model() -> Gemma4ForCausalLM:
    """A model in which layers 2 to 5 take the keys and values of layers 0 and 1, one of each attention type."""
    torch.manual_seed(1234)
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "num_kv_shared_layers": 4, "global_head_dim": 16}
    config = Gemma4TextConfig(
        **sizes,
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return Gemma4ForCausalLM(config)


def train_and_evaluate(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    model = sharing_model()
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=COUNT)
    wrapped.move_model_to_device()
    for is_recomputed in (False, True):
        batch = padded_batch(2 * COUNT)
        if is_recomputed:
            apply_checkpoint(wrapped)
            del batch["attention_mask"]  # transformers then makes no mask at all
        loss = wrapped.run_train(**batch)
        losses = train_in_one_process(whole, batch, COUNT)
        assert rank < 2 or same_loss(loss, losses)
        assert gradient_differences(wrapped, whole) == {}
    wrapped.eval()
    whole.eval()
    tokens = {"input_ids": padded_batch(2 * COUNT)["input_ids"]}
    output = wrapped.run_eval(**tokens)
    with torch.no_grad():
        logits = torch.cat([whole(**part).logits for part in microbatches(tokens, COUNT)])
    assert rank < 2 or torch.equal(output.logits, logits)


def same_loss(loss: object, losses: list[torch.Tensor]) -> bool:
    return isinstance(loss, torch.Tensor) and torch.equal(loss, torch.stack(losses).mean())


def test_every_number_is_that_of_one_process() -> None:
    run_ranks(3, train_and_evaluate)
