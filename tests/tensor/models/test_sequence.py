"""Sequence parallelism of unmodified Hugging Face models: two ranks equal one process."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from nxdpp import parallel_state, tensor_parallelize
from nxdpp.devices.collective_bytes import sent_bytes
from nxdpp.tensor.models.compared_types import COMPARED, COMPARED_SEQUENCES
from nxdpp.tensor.sequence_parallel import allreduce_sequence_parallel_gradients
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, batch, gradient_distance, make

TYPES = sorted(f"{name}ForCausalLM" for name in ("Gemma2", "Llama", "Qwen3"))
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
    "attention_dropout": 0.0,
}


def _make(name: str, **changes: Any) -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**(SIZES | changes)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Biases and norms that matter.
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(key))) / 4)
    return model


def _compare(name: str, kind: str = "", **changes: Any) -> None:
    model, whole = _make(name, **changes), _make(name, **changes)
    assert tensor_parallelize(model, sequence_parallel=True) is model
    if kind == "copied":
        model = copy.deepcopy(model)
    if kind == "recomputed":
        model.gradient_checkpointing_enable()
    for each in (model, whole):
        for key, parameter in each.named_parameters():
            parameter.requires_grad_(kind != "frozen" or "norm" in key)
    inputs = batch()
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, 6:] = 0
    output, expected = model(**inputs), whole(**inputs)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    output.loss.backward()
    expected.loss.backward()
    allreduce_sequence_parallel_gradients(model.parameters())
    trained = {key: each for key, each in model.named_parameters() if each.requires_grad}
    assert gradient_distance(trained, whole) < 1e-5, (name, kind)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, expected.loss.detach(), rtol=1e-5, atol=0)


def _cases(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for name in TYPES:
        _compare(name)
    for kind in ("copied", "recomputed", "frozen", "padded"):
        _compare("LlamaForCausalLM", kind)
    _compare("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    _compare("LlamaForCausalLM", tie_word_embeddings=True, num_hidden_layers=1)
    parallel_state.destroy_model_parallel()


def test_the_compared_types() -> None:
    """``python -m tools.zoo tensor`` compares the others."""
    assert set(TYPES) <= COMPARED_SEQUENCES
    assert COMPARED_SEQUENCES <= COMPARED


def test_two_ranks_equal_one_process() -> None:
    run_ranks(2, _cases)


@pytest.mark.usefixtures("one_of_two")
class TestOneOfTwo:
    def test_least_messages(self) -> None:
        """A gather and a reduce-scatter of attention and feed-forward in each direction, and a gather for weights."""
        with FakeTensorMode():
            model: Any = tensor_parallelize(make("llama", num_hidden_layers=3), sequence_parallel=True)
            layer = model.model.layers[1]
            x = torch.empty(4, 8, 32)
            positions = model.model.rotary_emb(x, torch.arange(8)[None])
            part = torch.empty(4, 4, 32, requires_grad=True)
            with sent_bytes() as sent:
                output = layer(part, position_embeddings=positions)
                output.sum().backward()
        assert output.shape == part.shape
        # Each of the ten sends half of the whole to the other rank.
        assert sent.total == 10 * x.nbytes / 2

    def test_a_length_that_does_not_divide(self) -> None:
        model = tensor_parallelize(make("llama"), sequence_parallel=True)
        layer = model.model.layers[0]
        with pytest.raises(ValueError, match=r"a sequence of 7 tokens.* \(4, 7, 32\), over 2 .*a multiple of 2"):
            layer(torch.empty(4, 7, 32))
        with pytest.raises(RuntimeError, match="no hidden states among the arguments of a LlamaDecoderLayer"):
            layer(x=torch.empty(4, 8, 32))

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            (
                "experts",
                r"of model\.layers\.0\.mlp\.experts, a Qwen3MoeExperts of the style moe_tp_experts, and only norms",
            ),
            ("t5", r"needs one list of layers .* divides encoder\.block, decoder\.block: leave it out"),
        ],
    )
    def test_types_whose_sequence_is_not_divided(self, name: str, sentence: str) -> None:
        model = make(name)
        with pytest.raises(ValueError, match=sentence):
            tensor_parallelize(model, sequence_parallel=True)
        assert not any(getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters())
