"""``nxdpp.tensor_plan``: the default plan of a model, asked without ranks."""

import pytest
from torch import nn
from transformers import LlamaForCausalLM

from nxdpp import tensor_parallelize, tensor_plan
from tests.support import models


class Other(LlamaForCausalLM):
    """A class that is on no list."""


def test_it_is_the_plan_that_the_model_is_divided_by(one_of_two: None) -> None:
    model = models.make("llama")
    plan = tensor_plan(model)

    assert plan is not None
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    tensor_parallelize(model)
    assert model.get_parameter("model.layers.0.mlp.down_proj.weight").shape[1] * 2 == model.config.intermediate_size


def test_a_model_without_a_compared_plan_has_none(one_of_two: None) -> None:
    for module in (nn.Linear(4, 4), Other(models.make("llama").config)):
        assert tensor_plan(module) is None
        with pytest.raises(ValueError, match=r"has no tp_plan|its tp_plan was not compared"):
            tensor_parallelize(module)
