"""Unmodified Hugging Face models over two tensor-parallel ranks equal one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.sequence_parallel import allreduce_sequence_parallel_gradients
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import MODELS, VOCABULARY, batch, differing, gradient_distance, llama, make


def _compare(
    name: str, change: Callable[[Any], None] | None = None, plan: dict[str, str] | None = None, **changes: Any
) -> tuple[float, float, int]:
    """Distances of the loss and of the gradients, and the number of logits of this rank."""
    model, whole = make(name, **changes), make(name, **changes)
    if change is not None:
        change(model)
        change(whole)
    assert tensor_parallelize(model, plan) is model
    assert not differing(dict(model.named_parameters()), whole)
    output, expected = model(**batch()), whole(**batch())
    output.loss.backward()
    expected.loss.backward()
    allreduce_sequence_parallel_gradients(model.parameters())
    loss = abs(float(output.loss.detach() / expected.loss.detach()) - 1)
    return loss, gradient_distance(dict(model.named_parameters()), whole), output.logits.shape[-1]


def _all_models(rank: int) -> dict[str, tuple[float, float, int]]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    _check_tokens()
    results = {name: _compare(name) for name in MODELS}
    results["tied"] = _compare("llama", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="its 63 rows do not divide .*resize_token_embeddings.64. before"):
        results["odd vocabulary"] = _compare("llama", vocab_size=63, pad_token_id=None)
    # The remedies of the warning, and of the refusal of heads that do not divide.
    results["resized"] = _compare("llama", _resize, vocab_size=63, pad_token_id=None)
    plan = {name: style for name, style in llama().tp_plan.items() if ".self_attn." not in name}
    results["one head"] = _compare("llama", plan=plan, num_key_value_heads=1)
    return results


def _resize(model: Any) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(VOCABULARY)


def _check_tokens() -> None:
    """A gathered head, which the refusal of ``generate`` names, gives the tokens of one process."""
    whole = make("llama")
    model = tensor_parallelize(make("llama"), gather_logits=True)
    assert model(**batch()).logits.shape[-1] == VOCABULARY
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    ours, theirs = (each.eval().generate(batch(1)["input_ids"], **options) for each in (model, whole))
    assert torch.equal(ours, theirs)


def test_two_ranks_equal_one_process() -> None:
    for results in run_ranks(2, _all_models):
        for name, (loss, gradients, logits) in results.items():
            assert loss < 1e-5, name
            assert gradients < 1e-5, name
            # Causal losses take this rank's logits.
            divided = name in ("llama", "experts", "gpt2", "tied", "resized", "mixtral")
            assert logits == (63 if name == "odd vocabulary" else VOCABULARY // 2 if divided else VOCABULARY), name


@pytest.mark.filterwarnings("ignore:.*this plan was not compared")
@pytest.mark.usefixtures("one_of_two")
class TestOneOfTwo:
    def test_layers_are_those_of_parallel_layers(self) -> None:
        model = tensor_parallelize(make("llama", tie_word_embeddings=True))
        layer = model.model.layers[0]
        assert isinstance(layer.self_attn.q_proj, ColumnParallelLinear)
        assert isinstance(layer.mlp.down_proj, RowParallelLinear)
        assert isinstance(model.model.embed_tokens, ParallelEmbedding)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.shape == (VOCABULARY // 2, 32)
        assert vars(model.lm_head.weight)["partition_dim"] == 0

    def test_heads_that_do_not_divide(self) -> None:
        model = make("llama", num_key_value_heads=1)
        sentence = r"k_proj has 1 head \(8 / head_dim=8\), which do not divide over 2 .*whole by a plan= without its"
        with pytest.raises(ValueError, match=sentence):
            tensor_parallelize(model)
        assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear

    def test_a_linear_layer_with_a_forward_of_its_own(self) -> None:
        class Doubled(nn.Linear):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(input)

        with pytest.raises(ValueError, match="0 is a Doubled with a forward of its own, which may not work on a part"):
            tensor_parallelize(nn.Sequential(Doubled(4, 4)), {"0": "colwise"})

    def test_styles_and_forms(self) -> None:
        with pytest.raises(ValueError, match="unknown styles in the plan: diagonal"):
            tensor_parallelize(make("llama"), {"model.layers.*.mlp": "diagonal"})
        with pytest.raises(TypeError, match="plan must be a dict of name patterns and styles"):
            tensor_parallelize(make("llama"), ["colwise"])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a LlamaMLP, the style colwise, which does not fit it"):
            tensor_parallelize(make("llama"), {"model.layers.*.mlp": "colwise"})
        with pytest.raises(ValueError, match=r"the plan names model\.other, which LlamaForCausalLM does not have"):
            tensor_parallelize(make("llama"), {"model.other": "colwise", "lm_head": "colwise_rep"})

    def test_methods_that_take_a_part_for_the_whole(self, tmp_path: Path) -> None:
        model = tensor_parallelize(make("llama"))
        for module in (model, model.model):
            with pytest.raises(RuntimeError, match=r"call nxdpp\.save_pretrained\(NxDPPModel\(model"):
                module.save_pretrained(tmp_path)
            with pytest.raises(RuntimeError, match=r"call it before tensor_parallelize\(model\)"):
                module.resize_token_embeddings(VOCABULARY + 2)
        with pytest.raises(RuntimeError, match="whose head returns all of them"):
            model.generate(batch()["input_ids"])
        assert not list(tmp_path.iterdir())

    def test_optimizers_of_the_whole_parameters(self) -> None:
        model = make("llama")
        parameters, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"Make the optimizer after NxDPPModel\(tensor_parallelize\(model"):
            tensor_parallelize(model)
        assert type(model.lm_head) is nn.Linear
        optimizer.param_groups.clear()
        tensor_parallelize(model)
        with pytest.raises(RuntimeError, match="they were replaced"):
            torch.optim.SGD(parameters, lr=0.1).step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def test_one_call_before_the_wrapper(self) -> None:
        model = tensor_parallelize(make("llama"))
        with pytest.raises(ValueError, match="call tensor_parallelize once"):
            tensor_parallelize(model)
        with pytest.raises(TypeError, match="takes a model before it is wrapped"):
            tensor_parallelize(NxDPPModel(model))

    def test_a_tie_with_a_module_outside_of_the_plan(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        with pytest.raises(ValueError, match="0 is divided, and 1, a Linear, has the same weight"):
            tensor_parallelize(model, {"0": "colwise"})


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_copies_and_moves_keep_the_attributes(name: str) -> None:
    """Clipping counts a part once a rank that has it, and checkpoints need its dimension."""

    def attributes(module: nn.Module) -> dict[str, tuple[Any, ...]]:
        keys = ("tensor_model_parallel", "partition_dim", "partition_stride", "num_partitions", "whole_size")
        return {
            key: tuple(getattr(parameter, each, None) for each in keys) for key, parameter in module.named_parameters()
        }

    model = tensor_parallelize(make(name))
    expected = attributes(model)
    assert any(values[0] for values in expected.values())
    copied = copy.deepcopy(model)
    assert attributes(copied) == expected
    copied.to("meta")
    copied.tie_weights()
    assert attributes(copied) == expected
