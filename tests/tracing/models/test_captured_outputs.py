"""Outputs that hooks of transformers collect inside layers are values of the graph: router logits, hidden states."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

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


def test_hidden_states_and_attentions_are_those_of_the_model() -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    inputs = {**make_inputs("llama"), "output_hidden_states": True, "output_attentions": True}

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
