"""Models that a device does not run as they are are refused, and the remedies of the messages are accepted."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.devices.device import Device
from nxdpp.pipeline.local.refused_models import refuse_grouped_experts, refuse_lost_ties
from tests.support.models import make


def _untied(**options: Any) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **{**sizes, **options}))
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    return model


def test_a_tie_of_the_configuration_that_is_two_equal_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "is_lazy", True)
    model = _untied(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"inner.model.embed_tokens.weight and inner.lm_head.weight .* tie_weights\("):
        refuse_lost_ties(nn.ModuleDict({"inner": model}))
    model.tie_weights()
    refuse_lost_ties(model)


def test_a_program_may_untie_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_lost_ties(_untied(tie_word_embeddings=True))
    monkeypatch.setattr(Device, "is_lazy", True)
    refuse_lost_ties(_untied(tie_word_embeddings=False))
    model = _untied(tie_word_embeddings=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    refuse_lost_ties(model)


def test_experts_are_refused_on_xla_devices_and_the_remedy_is_accepted() -> None:
    model, xla = make("mixtral", layers=1), torch.device("xla")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts, a MixtralExperts, .*xla devices"):
        refuse_grouped_experts(model, xla)
    refuse_grouped_experts(model, torch.device("cpu"))
    model.set_experts_implementation("batched_mm")
    refuse_grouped_experts(model, xla)
