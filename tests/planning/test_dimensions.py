"""State of ranks with tensor, data and ZeRO parallelism, against formulas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, expert_parallelize, parallel_state
from nxdpp.__main__ import main
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layer_times import CountedModel
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, Job, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict
from tests.support.expert_models import deepseek_v3, mixtral

VOCABULARY, HIDDEN, MIDDLE, LAYERS = 64, 32, 48, 4
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MATRICES = HIDDEN * HIDDEN * 2 + HIDDEN * (HIDDEN // 2) * 2 + 3 * HIDDEN * MIDDLE
"""Elements of the linear layers of a transformer layer."""
COUNTED: dict[torch.dtype, dict[tuple[int, bool, int, int], CountedModel]] = {}
"""Counts of the model, for all tests."""


def _predict(layout: Layout, dtype: torch.dtype = torch.float32) -> Prediction:
    """Return the prediction of two stages of two layers each."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**CONFIG), dtype=dtype)
    job = Job(4 * layout.data, lambda size: microbatch_on_meta(model, size, 16))
    costs = ModelCosts(model, Machine(layout.devices, 2**40, DEVICES["cpu"]), job)
    costs._counted = COUNTED.setdefault(dtype, costs._counted)
    return predict(costs, layout, [2, LAYERS + 1])


@pytest.mark.parametrize("tensor", [1, 2])
def test_linear_layers_and_vocabulary_are_divided_and_norms_are_whole(tensor: int) -> None:
    first, last = _predict(Layout(tensor, 2)).memory

    matrices = LAYERS // 2 * MATRICES + VOCABULARY * HIDDEN
    assert first.weights == 4 * (matrices // tensor + LAYERS * HIDDEN)
    assert last.weights == 4 * (matrices // tensor + LAYERS * HIDDEN + HIDDEN)
    assert not parallel_state.model_parallel_is_initialized()


def test_sequence_parallelism_divides_activations_and_messages_of_the_pipeline() -> None:
    whole, part = _predict(Layout(2, 2)), _predict(Layout(2, 2, sequence=True))
    for one, other in zip(whole.memory, part.memory, strict=True):
        assert one.weights == other.weights
        assert one.activations / 2 < other.activations < one.activations
    assert part.most_sent.pipeline == whole.most_sent.pipeline / 2


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_zero1_shares_moments_and_master_copies_of_float32(dtype: torch.dtype, each: int) -> None:
    for rank in _predict(Layout(1, 2, 4, zero=1), dtype).memory:
        assert rank.optimizer == rank.weights / dtype.itemsize * each / 4
        assert rank.gradients == rank.weights


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_2_and_3_share_parameters_in_float32(zero: int) -> None:
    plain, shared = _predict(Layout(1, 2, 4)), _predict(Layout(1, 2, 4, zero=zero), torch.bfloat16)
    for one, other in zip(plain.memory, shared.memory, strict=True):
        assert (other.weights, other.gradients, other.optimizer) == (
            one.weights / 4,
            one.gradients / 4,
            one.optimizer / 4,
        )


def _of_mixture(
    layout: Layout, model: Any, device: str = "cpu", ends: list[int] | None = None, **options: Any
) -> Prediction:
    """Return the prediction of a mixture of four layers, with 8 samples of 16 tokens for each replica."""
    job = Job(8 * layout.data, lambda size: microbatch_on_meta(model, size, 16))
    return predict(ModelCosts(model, Machine(layout.devices, 2**40, DEVICES[device]), job, **options), layout, ends)


def _mixture(make: Any = mixtral) -> Any:
    """Grouped experts can be counted in bfloat16."""
    with torch.device("meta"):
        return make(4).to(torch.bfloat16)


@pytest.mark.parametrize(("make", "experts"), [(mixtral, 1), (mixtral, 2), (mixtral, 4), (deepseek_v3, 2)])
def test_the_state_of_experts_is_that_of_the_divided_model(make: Any, experts: int) -> None:
    layout = Layout(pipeline=2, data=4, zero=1, experts=experts)
    found, shards = (_of_mixture(replace(layout, zero=zero), _mixture(make), ends=[2, LAYERS + 1]) for zero in (1, 3))

    for rank in range(2):
        sizes: dict[str, Any] = {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_rank": rank,
            "data_parallel_size": 4,
        }
        parallel_state.initialize_debug(**sizes, expert_model_parallel_size=experts)
        try:
            model = NxDPPModel(expert_parallelize(_mixture(make)), num_microbatches=2, pipeline_cuts=found.cuts)
            own = list(model.local_parameters())
        finally:
            parallel_state.destroy_model_parallel()
        mine = sum(each.nbytes for each in own if is_of_experts(each))
        others = sum(each.nbytes for each in own) - mine
        assert (mine > 0) == (experts > 1)
        memory = found.memory[rank]
        assert memory.weights == memory.gradients == mine + others
        # Two moments and copies of float32, which the ranks with the same parameters share.
        assert memory.optimizer == 6 * (others / 4 + mine * experts / 4)
        assert shards.memory[rank].weights == 2 * (others / 4 + mine * experts / 4)


def test_tokens_go_to_experts_and_back_in_each_forward_and_backward() -> None:
    layout = Layout(data=4, experts=2)
    one, more = (_of_mixture(layout, _mixture(), expert_load=load).sent[0].data for load in (1.0, 1.5))
    none = _of_mixture(Layout(data=4), _mixture())
    again = _of_mixture(Layout(data=4, experts=2, checkpoint=True), _mixture(), expert_load=1.0).sent[0].data

    # Layers, microbatches, tokens with two choices of 16 numbers of 2 bytes; half of them stay on their rank.
    tokens = 4 * 8 * 16 * 2 * 16 * 2 / 2
    assert more - one == 4 * tokens / 2
    assert again - one == 2 * tokens
    # An average of all parameters over 4 ranks, and of experts over the 2 ranks with the same ones.
    parameters, experts = none.memory[0].weights, 4 * 4 * 3 * 16 * 24 * 2
    assert one == 4 * tokens + 2 * (parameters - experts) * 3 / 4 + 2 * (experts / 2) / 2
    assert none.sent[0].data == 2 * parameters * 3 / 4


def test_pairs_of_dualpipe_v_hide_tokens_as_the_schedule_says() -> None:
    sizes: dict[str, Any] = {"pipeline": 2, "data": 2, "chunks": 2, "experts": 2}
    found = {name: _of_mixture(Layout(**sizes, schedule=name), _mixture(), "h100") for name in ("dualpipe-v", "zb-v")}
    on_host = _of_mixture(Layout(**sizes, schedule="dualpipe-v"), _mixture())

    for rank in range(2):
        hidden, shown = (found[name].times[rank].tokens for name in ("dualpipe-v", "zb-v"))
        assert 0 < hidden < 0.9 * shown
    # A host does nothing while it exchanges.
    whole = _of_mixture(Layout(**sizes, schedule="zb-v"), _mixture())
    assert on_host.times[0].tokens == pytest.approx(whole.times[0].tokens)


def test_experts_that_replicas_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"8 replicas cannot share .* 4 experts. Give .* one of 1, 2, 4"):
        _of_mixture(Layout(data=8, experts=8), _mixture())
    with pytest.raises(ValueError, match="experts are shared by 4 replicas, which must divide the 2 of the job"):
        _of_mixture(Layout(data=2, experts=4), _mixture())
    with pytest.raises(ValueError, match=r"2 replicas cannot share .* LlamaForCausalLM: its layers have no experts"):
        _predict(Layout(1, 2, 2, experts=2))


def _plan(folder: Path, *arguments: str) -> int:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    given = ("--pipeline-parallel-size", "2", "--num-microbatches", "4", "--seq-length", "16", *arguments)
    return main(["plan", str(folder), *given])


def test_the_command_takes_each_dimension(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--tensor-parallel-size", "2", "--data-parallel-size", "4", "--zero", "1", "--sequence-parallel")
    assert _plan(tmp_path, *sizes, "--batch-size", "8") == 0
    output = capsys.readouterr().out
    assert "LlamaForCausalLM, 16 h100 devices on 1 host, 32 samples per step" in output
    assert "2 x 2 x 4  1f1b" in output
    assert "z1s" in output
    assert _plan(tmp_path, "--sequence-parallel", "--tensor-parallel-size", "2", "--seq-length", "15") == 2
    assert "a sequence of 15 tokens does not divide over 2" in capsys.readouterr().err
    assert _plan(tmp_path, "--tensor-parallel-size", "3") == 2
    assert "3 tensor-parallel ranks" in capsys.readouterr().err
    assert not parallel_state.model_parallel_is_initialized()
