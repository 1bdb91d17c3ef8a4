"""Experts whose products the device of the ranks does not run."""

import pytest
import torch

from nxdpp.pipeline.local.grouped_experts import refuse_grouped_experts
from tests.support.models import make

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
