"""Configurations of transformers models are compared field by field, over pipelines and replicas."""

from typing import Any

import pytest
from torch import nn
from transformers import LlavaConfig

from nxdpp import NxDPPModel, parallel_state
from nxdpp.agreement.plain_attributes import _fields, configuration_lines
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks


def differing(first: Any, second: Any) -> list[str]:
    theirs, ours = configuration_lines(first), configuration_lines(second)
    return [line for line in ours if line not in theirs]


def test_each_field_has_a_line() -> None:
    assert differing(make("llama"), make("llama")) == []
    assert differing(make("llama"), make("llama", rms_norm_eps=1e-3)) == ["configuration rms_norm_eps: 0.001"]
    other_rope = {"rope_type": "default", "rope_theta": 5.0}
    lines = differing(make("llama"), make("llama", rope_parameters=other_rope))
    assert lines == ["configuration rope_parameters.rope_theta: 5.0"]
    moved = make("llama", architectures=["LlamaModel"])
    moved.config.name_or_path = "/elsewhere"
    assert differing(make("llama"), moved) == []
    assert configuration_lines(nn.Linear(2, 2)) == []
    inside = configuration_lines(nn.ModuleDict({"tower": make("llama")}))
    assert "configuration tower.rms_norm_eps: 1e-06" in inside
    assert "configuration tower.class of the model: transformers.models.llama.modeling_llama.LlamaForCausalLM" in inside
    assert ("text_config.rms_norm_eps", 1e-06) in list(_fields(vars(LlavaConfig())))


def train(rank: int, dropout: float) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    wrapped = NxDPPModel(make("gpt2", dropout=dropout * rank), num_microbatches=2)
    wrapped.run_train(**padded_batch(4))


def test_replicas_of_other_configurations_are_refused() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, train, 0.1)
    message = str(caught.value)
    assert "data-parallel rank 1 (rank 1) has another configuration than data-parallel rank 0" in message
    assert "data-parallel rank 0 (rank 0): configuration attn_pdrop: 0.0\n" in message
    assert "data-parallel rank 1 (rank 1): configuration attn_pdrop: 0.1\n" in message
    assert "n_embd" not in message
