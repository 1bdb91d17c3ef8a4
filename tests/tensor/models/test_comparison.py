"""Comparison of plans with one process, and the types whose plans have rules of their own."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nxdpp import check_tensor_parallel, parallel_state, tensor_parallelize
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, batch, llama, make
from tools.zoo import build, inputs

TYPES = ("doge", "gemma3n_text", "inkling_text")


def _doge(**changes: Any) -> Any:
    model = build("causal-lm", "doge")
    if changes:
        torch.manual_seed(0)
        model = type(model)(type(model.config)(**(model.config.to_dict() | changes)))
    for layer in model.model.layers:
        # From its initial value of 0 the gradient before it is 0.
        torch.nn.init.uniform_(layer.self_attn.A, -1.0, 1.0)
    return model


def _differences(rank: int) -> dict[str, float]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    models: dict[str, Callable[[], Any]] = {name: partial(build, "causal-lm", name) for name in TYPES[1:]}
    models["doge"] = _doge
    models["doge of experts"] = lambda: _doge(is_moe=True, num_experts=16, num_experts_per_tok=2, attention_bias=True)
    found = {}
    for name, model in models.items():
        whole = model()
        found[name] = check_tensor_parallel(whole, inputs("causal-lm", whole, 1))[0]
    return found


def test_rules_of_ours_equal_one_process() -> None:
    for found in run_ranks(2, _differences):
        for name, distance in found.items():
            assert distance < 1e-12, name


class _Other(LlamaForCausalLM):
    """A class that is on no list."""


def _checked(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    right = dict(make("experts").tp_plan)
    wrong = {name: style for name, style in right.items() if not name.endswith(("q_norm", "k_norm"))}
    model = make("experts")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"differs from one process by .* at model\.layers.*_norm.*correct the plan"):
        check_tensor_parallel(model, batch(), wrong)
    with pytest.warns(UserWarning, match=r"Call check_tensor_parallel\(small_model, inputs, plan\) before"):
        tensor_parallelize(make("experts"), wrong)
    # The remedies of the error and of the warning.
    check_tensor_parallel(model, batch(), right)
    assert model.training
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor_parallelize(model, right)

    torch.manual_seed(0)
    other = _Other(llama().config)
    with pytest.raises(ValueError, match=r"_Other: its tp_plan was not compared .*check_tensor_parallel\(small_model"):
        tensor_parallelize(other)
    with pytest.raises(ValueError, match=r"from one seed on all ranks"):
        check_tensor_parallel(make("llama", rank), batch())
    with pytest.raises(ValueError, match="no loss and no floating tensor"):
        check_tensor_parallel(_WithoutOutput(other.config), batch())
    check_tensor_parallel(other, batch())
    assert tensor_parallelize(other).lm_head.weight.shape == (VOCABULARY // 2, 32)


class _WithoutOutput(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {}


def test_plans_that_were_and_were_not_compared() -> None:
    run_ranks(2, _checked)


@pytest.mark.filterwarnings("ignore:.*this plan was not compared")
@pytest.mark.usefixtures("one_of_two")
class TestOneOfTwo:
    @pytest.mark.parametrize(
        ("model_type", "rule"),
        [
            ("doge", r"\.self_attn\.v_proj\. It must have .*dt_proj': 'rowwise_own_outputs', because the mask"),
        ],
    )
    def test_a_plan_without_a_rule_of_ours(self, model_type: str, rule: str) -> None:
        model: Any = build("causal-lm", model_type, "meta")
        with pytest.raises(ValueError, match=rule):
            tensor_parallelize(model, model.tp_plan)
        without = {name: style for name, style in model.tp_plan.items() if ".mlp." not in name and "self" not in name}
        assert not without or tensor_parallelize(model, without) is model
