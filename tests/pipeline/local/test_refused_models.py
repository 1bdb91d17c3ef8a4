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


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "is_lazy", True)


@pytest.mark.usefixtures("lazy")
def test_a_tie_of_the_configuration_that_is_two_equal_parameters_is_refused() -> None:
    model = _untied(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"inner.model.embed_tokens.weight and inner.lm_head.weight .* tie_weights\("):
        refuse_lost_ties(nn.ModuleDict({"inner": model}))
    model.tie_weights()
    refuse_lost_ties(model)


@pytest.mark.usefixtures("lazy")
def test_weights_that_were_made_different_or_are_not_tied_pass() -> None:
    refuse_lost_ties(_untied(tie_word_embeddings=False))
    model = _untied(tie_word_embeddings=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    refuse_lost_ties(model)


def test_a_program_may_untie_weights_on_other_devices() -> None:
    refuse_lost_ties(_untied(tie_word_embeddings=True))


XLA = torch.device("xla")


def test_the_remedy_of_a_refusal_is_accepted() -> None:
    model = make("mixtral", layers=1)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts, a MixtralExperts, .*xla devices"):
        refuse_grouped_experts(model, XLA)

    model.set_experts_implementation("batched_mm")
    refuse_grouped_experts(model, XLA)


def test_experts_of_the_cpu_and_models_without_experts_are_accepted() -> None:
    refuse_grouped_experts(make("mixtral", layers=1), torch.device("cpu"))
    refuse_grouped_experts(make("llama", layers=1), XLA)
