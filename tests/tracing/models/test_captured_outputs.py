"""Outputs that hooks of transformers collect inside layers are values of the graph: router logits, hidden states."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.models import padded_batch
from tests.support.traced_models import make_inputs, make_model, run_graph, trace_with

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.1,
}


def mixture(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls: Any = getattr(transformers, f"{name}ForCausalLM")
    return cls(cls.config_class(**SIZES, **changes))


def test_the_balancing_loss_of_a_mixture_of_experts_is_exact() -> None:
    """``pipeline/whole/test_auxiliary_losses`` has Mixtral."""
    model = mixture("GptOss", output_router_logits=True)
    assert model(**padded_batch(4)).aux_loss > 0
    assert_exact(model, padded_batch(4))


def test_routers_of_an_encoder_and_a_decoder() -> None:
    torch.manual_seed(0)
    layers: dict[str, Any] = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
    sizes: dict[str, Any] = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = SwitchTransformersConfig(**layers, **sizes, num_experts=4, tie_word_embeddings=False)
    config.decoder_start_token_id = 0
    model, inputs = SwitchTransformersForConditionalGeneration(config).eval(), padded_batch(4)
    asked = {**inputs, "output_router_logits": True}
    (loss,) = InProcessPipeline(model, 2, asked).train(asked, 1)
    assert loss == model(**asked, use_cache=False).loss != model(**inputs, use_cache=False).loss


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_hidden_states_and_attentions_are_those_of_the_model(name: str) -> None:
    model = make_model(name)
    model.set_attn_implementation("eager")
    inputs = {**make_inputs(name), "output_hidden_states": True, "output_attentions": True}

    given = run_graph(model, trace_with(model, inputs), inputs)

    model.config.use_cache = False
    expected = model(**inputs)
    assert len(given.hidden_states) == 5
    assert len(given.attentions) == 4
    for ours, theirs in zip(given.hidden_states + given.attentions, expected.hidden_states + expected.attentions,
                            strict=True):  # fmt: skip
        assert torch.equal(ours, theirs)


def test_a_model_inside_a_module_is_asked_for_router_logits() -> None:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mixture("Mixtral", use_cache=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, output_router_logits=True)
            return output.logits.square().mean() + sum(x.logsumexp(-1).square().mean() for x in output.router_logits)

    inputs = padded_batch(4)
    del inputs["labels"]
    model = Balanced()
    assert_exact(model, inputs)
    assert len(model.model.model.layers[0].mlp.gate._forward_hooks) == 1


def test_a_layer_that_gives_another_number_of_outputs_is_an_error() -> None:
    model, inputs = mixture("Mixtral", output_router_logits=True), padded_batch(2)
    pipeline = InProcessPipeline(model, 2, inputs)
    pipeline.train(inputs, 1)
    assert transformers.utils.output_capturing._active_collector.get() is None
    model.model.layers[1].mlp.gate._forward_hooks.clear()
    with pytest.raises(RuntimeError, match="has given 0 outputs for router_logits; the trace expected 1"):
        pipeline.train(inputs, 1)
