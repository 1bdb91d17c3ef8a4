"""Activation checkpointing of ``nxdpp.oslo.initialize``: less is kept, and gradients are equal to the bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, BertForMaskedLM

import nxdpp.oslo as oslo
from nxdpp import parallel_state
from nxdpp.doors.oslo import activation_checkpointing
from tests.doors.oslo.checkpointing import config, equal, gradients_of, noted
from tests.doors.oslo.training import LENGTH, MODELS, ROWS, VOCABULARY, batch, gpt2


def _albert() -> Any:
    torch.manual_seed(0)
    rates: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    return AlbertForMaskedLM(AlbertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **rates))


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("name", [*MODELS, "albert"])
def test_less_is_kept_and_gradients_are_equal(name: str) -> None:
    make = {**MODELS, "albert": _albert}[name]
    whole = make().train()
    expected, whole_bytes = gradients_of(whole)
    for keys in ({}, {"cpu_checkpointing": True}):
        model = oslo.initialize(make(), config(**keys)).train()
        gradients, kept = gradients_of(model)
        assert equal(gradients, expected)
        assert kept < 0.6 * whole_bytes
        # In evaluation mode too, which is that of from_pretrained.
        assert equal(gradients_of(model.eval())[0], expected)


def test_dropout_repeats() -> None:
    def model() -> Any:
        changed = gpt2()
        for module in changed.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        return changed.train()

    expected, _ = gradients_of(model())
    assert equal(gradients_of(oslo.initialize(model(), config()))[0], expected)


def test_inputs_are_kept_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = noted(monkeypatch)
    gradients_of(oslo.initialize(gpt2(), config(cpu_checkpointing=True)))
    hidden = [each for each in kept if each.values.shape == (ROWS, LENGTH, 16)]
    assert len(hidden) == 4
    assert all(each.values.device == torch.device("cpu") for each in hidden)


def test_the_memory_of_all_parts_is_taken_at_once() -> None:
    memory, device, part = activation_checkpointing._PartMemory(2), torch.device("cpu"), torch.rand(2, 3)
    first = memory.copy(part, device)
    ((second,),) = memory._free.values()
    assert memory.copy(part + 1, device) is second
    assert torch.equal(torch.stack((first, second)), torch.stack((part, part + 1)))
    # Another batch, whose last part is not taken before the shape changes.
    assert memory.copy(part, device).shape == (2, 3)
    assert memory.copy(part[:1], device).shape == (1, 3)
    assert not memory._free


def test_each_shape_takes_its_memory_once() -> None:
    memory, device, part = activation_checkpointing._PartMemory(4), torch.device("cpu"), torch.rand(2, 3)
    for _ in range(2):
        for shaped in (part, part[:1]):
            memory.copy(shaped, device)
        later = [free[-1] for free in memory._free.values()]
        assert [memory.copy(shaped, device) is own for shaped, own in zip((part, part[:1]), later, strict=True)] == [
            True,
            True,
        ]


def test_a_cache_is_used_without_gradients_only() -> None:
    model, whole = oslo.initialize(gpt2(), config()), gpt2()
    ids = batch(0, 0)["input_ids"][:, : LENGTH // 2]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), whole.generate(ids, **options))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    assert cache.get_seq_length() == LENGTH // 2
    with pytest.raises(ValueError, match="leave it out, or call the model under"):
        model(ids[:, :1], past_key_values=cache)


def test_a_model_without_layers_is_refused() -> None:
    model = BertForMaskedLM(MODELS["bert"]().config)
    del model.bert.encoder.layer
    with pytest.raises(ValueError, match="has no layers that"):
        oslo.initialize(model, config())
