"""Plans with tensor, data and ZeRO-1 parallelism: memory and traffic of a rank, against formulas."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import parallel_state
from nxdpp.__main__ import main
from nxdpp.pipeline.partition.layer_costs import StateBytes
from nxdpp.planning.dimensions import divided
from nxdpp.planning.layout import Dimensions
from nxdpp.planning.stage_summary import StageSummary, summarise_stages
from nxdpp.planning.text_table import bytes_text
from nxdpp.schedules.chosen import ChosenSchedule

VOCABULARY, HIDDEN, MIDDLE, LAYERS, B, T, MICROBATCHES = 64, 32, 48, 4, 2, 16, 4
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


@cache
def _stages(
    tensor: int = 1, data: int = 1, zero: int = 0, sequence: bool = False, **changes: Any
) -> list[StageSummary]:
    dtype, name = changes.pop("dtype", torch.float32), changes.pop("schedule", None)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**CONFIG), dtype=dtype)
    ids = torch.empty(B, T, dtype=torch.int64, device="meta")
    sizes = Dimensions(tensor, data, zero, sequence)
    with divided(model, sizes):
        schedule = ChosenSchedule(name, 2, MICROBATCHES, 1)
        return summarise_stages(model, {"input_ids": ids, "labels": ids}, schedule, sizes=sizes, **changes)


@pytest.mark.parametrize("tensor", [1, 2])
def test_linear_layers_and_vocabulary_are_divided_and_norms_are_whole(tensor: int) -> None:
    first, last = _stages(tensor)

    matrices = LAYERS // 2 * MATRICES + VOCABULARY * HIDDEN
    assert first.state.parameters == matrices // tensor + LAYERS * HIDDEN
    assert last.state.parameters == matrices // tensor + LAYERS * HIDDEN + HIDDEN
    assert not parallel_state.model_parallel_is_initialized()


def test_each_rank_of_a_tensor_group_keeps_its_part_of_the_activations() -> None:
    for whole, half in zip(_stages(), _stages(2), strict=True):
        assert whole.peak_activations / 2 < half.peak_activations < whole.peak_activations
        assert half.sent_bytes == whole.sent_bytes
        assert half.forward == pytest.approx(whole.forward / 2)


@pytest.mark.parametrize("tensor", [1, 2])
def test_traffic_of_the_tensor_group(tensor: int) -> None:
    """A layer sums two outputs, and the gradients of two inputs: of attention and feed-forward."""
    first, last = _stages(tensor)

    states, tokens = B * T * HIDDEN * 4, B * T * 4
    ring = 2 * (tensor - 1) / tensor
    layers = LAYERS // 2 * 4 * states
    assert first.traffic.tensor == MICROBATCHES * ring * (layers + states)
    # The head sums its input's gradient. The loss exchanges a maximum and two sums of each token.
    assert last.traffic.tensor == MICROBATCHES * ring * (layers + states + 3 * tokens)


def test_sequence_parallelism_divides_activations_and_messages_of_the_pipeline() -> None:
    for whole, part in zip(_stages(2), _stages(2, sequence=True), strict=True):
        assert part.state == whole.state
        assert whole.peak_activations / 2 < part.peak_activations < whole.peak_activations
    states = B * T * HIDDEN * 4
    assert _stages(2)[0].sent_bytes - _stages(2, sequence=True)[0].sent_bytes == states / 2


def test_traffic_of_a_tensor_group_that_divides_the_sequence() -> None:
    """A layer gathers two inputs and scatters two sums, there and back. It gathers the inputs again for its weights."""
    first, last = _stages(2, sequence=True)

    states, tokens = B * T * HIDDEN * 4, B * T * 4
    layers = LAYERS // 2 * 10 * states
    # The norms of the layers add their gradients up once a step, each with a number that tells if it is there.
    norms = 2 * LAYERS // 2 * (HIDDEN + 1) * 4
    # The embedding sums its output, and gathers its gradient before the first layer. The last layer's output is whole,
    # the head sums its input's gradient, and the loss exchanges three numbers of each token.
    assert first.traffic.tensor == (MICROBATCHES * (layers + 3 * states) + 2 * norms) / 2
    assert last.traffic.tensor == (MICROBATCHES * (layers + 3 * states + 2 * 3 * tokens) + 2 * norms) / 2


def test_traffic_of_the_replicas() -> None:
    for data in (1, 2, 4):
        for plain, sharded in zip(_stages(data=data), _stages(data=data, zero=1), strict=True):
            part = (data - 1) / data * plain.state.weights
            assert (plain.traffic.average, plain.traffic.reduce_scatter, plain.traffic.all_gather) == (2 * part, 0, 0)
            assert (sharded.traffic.average, sharded.traffic.reduce_scatter) == (0, part)
            assert sharded.traffic.all_gather == part


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_zero1_shares_moments_and_master_copies_of_float32(dtype: torch.dtype, each: int) -> None:
    for stage in _stages(data=4, zero=1, dtype=dtype):
        assert stage.state.optimizer == stage.state.parameters * each // 4
        assert stage.state.gradients == stage.state.weights == stage.state.parameters * dtype.itemsize


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_zero_2_and_3_share_parameters_in_float32(dtype: torch.dtype, size: int) -> None:
    """ZeRO-2 adds whole weights and gradients; ZeRO-3 the rest of a stage, two layers, and gradients of one of them."""
    layer = (MATRICES + 2 * HIDDEN) * size
    # The embedding, and a norm with the head.
    rests = (VOCABULARY * HIDDEN * size, (VOCABULARY + 1) * HIDDEN * size)
    found = [_stages(data=4, zero=zero, dtype=dtype) for zero in (0, 2, 3)]
    for rest, plain, once, each in zip(rests, *found, strict=True):
        shard = plain.state.parameters
        assert once.state == StateBytes(
            plain.state.parameters, shard + plain.state.weights, plain.state.weights, 2 * shard
        )
        assert each.state == StateBytes(
            plain.state.parameters, shard + rest + 2 * layer, shard + rest + layer, 2 * shard
        )
        part = plain.state.weights * 3 / 4
        assert (once.traffic.reduce_scatter, once.traffic.all_gather) == (part, part)
        assert (each.traffic.reduce_scatter, each.traffic.all_gather) == (MICROBATCHES * part, 2 * MICROBATCHES * part)


def test_zero_3_gathers_a_whole_stage_for_a_weight_gradient() -> None:
    for plain, split in zip(_stages(data=4), _stages(data=4, zero=3, schedule="zb-h1"), strict=True):
        whole, shard = plain.state.weights, plain.state.weights // 4
        assert split.state == StateBytes(plain.state.parameters, shard + whole, shard + whole, 2 * shard)
        # In the forward, the input-gradient and the weight-gradient.
        assert split.traffic.all_gather == 3 * MICROBATCHES * whole * 3 / 4
        assert split.traffic.reduce_scatter == MICROBATCHES * whole * 3 / 4


def test_a_memory_limit_counts_the_shared_state() -> None:
    used = max(stage.memory for stage in _stages(data=8, zero=1, balanced=True))

    stages = _stages(data=8, zero=1, balanced=True, memory_limit=used)
    assert max(stage.memory for stage in stages) <= used
    with pytest.raises(ValueError, match="no cut over 2 stages fits"):
        _stages(data=8, balanced=True, memory_limit=used)


def _plan(folder: Path, *arguments: str) -> int:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    given = ("--pipeline-parallel-size", "2", "--num-microbatches", "4", "--seq-length", "16", *arguments)
    return main(["plan", str(folder), *given])


def test_the_command_prints_what_each_dimension_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, "--data-parallel-size", "2", "--zero", "3") == 0
    written = capsys.readouterr().out
    assert "on 1 tensor x 2 pipeline x 2 data ranks,\n  ZeRO-3" in written
    assert "AdamW over the shards of fully_shard" in written
    sizes = ("--tensor-parallel-size", "2", "--data-parallel-size", "4", "--zero", "1")
    assert _plan(tmp_path, *sizes, "--batch-size", "8", "--details") == 0

    output = capsys.readouterr().out
    assert "on 2 tensor x 2 pipeline x 4 data ranks" in output
    (first, _) = _stages(2, 4, 1)
    row = next(line for line in reversed(output.splitlines()) if line.startswith("0 "))
    traffic = first.traffic
    sent = (traffic.tensor, 0, traffic.reduce_scatter, traffic.all_gather)
    assert re.split(r"  +", row) == ["0", *map(bytes_text, sent)]
    # Two channels, the pipeline, the tensor group and the replicas.
    assert _plan(tmp_path, "--tensor-parallel-size", "2", "--data-parallel-size", "2") == 0
    assert "activations + 500.0\n  MiB of communicators and messages" in capsys.readouterr().out


def test_the_command_divides_the_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sequence-parallel", "--tensor-parallel-size", "2", "--batch-size", "8")
    assert _plan(tmp_path, *options, "--details") == 0

    output = capsys.readouterr().out
    assert "on 2 tensor x 2 pipeline x 1 data ranks,\n  sequence parallel" in output
    (first, _) = _stages(2, sequence=True)
    assert bytes_text(first.traffic.tensor) in output
    assert _plan(tmp_path, "--sequence-parallel") == 2
    assert "add --tensor-parallel-size" in capsys.readouterr().err
    assert _plan(tmp_path, "--sequence-parallel", "--tensor-parallel-size", "2", "--seq-length", "15") == 2
    assert "a sequence of 15 tokens does not divide over 2" in capsys.readouterr().err


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, "--tensor-parallel-size", "3") == 2

    assert "3 tensor-parallel ranks" in capsys.readouterr().err
    assert _plan(tmp_path, "--zero", "2") == 2
    assert "--zero 2 shares parameters among replicas: add --data-parallel-size" in capsys.readouterr().err
    limited = ("--data-parallel-size", "2", "--zero", "3", "--partition", "balanced", "--memory-limit", "1")
    assert _plan(tmp_path, *limited) == 2
    assert "--memory-limit has no figure for --zero 3" in capsys.readouterr().err
    assert not parallel_state.model_parallel_is_initialized()
