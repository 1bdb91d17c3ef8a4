"""State of ranks with tensor, data and ZeRO parallelism, against formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import parallel_state
from nxdpp.__main__ import main
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layer_times import CountedModel
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, Job, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict

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
