"""Memory is counted as the kernel has it, limits are those of the issue, and weights are a model's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.resident import weights
from benchmarks.resident.processes import run_alone
from benchmarks.resident.program import owned_bytes
from benchmarks.resident.published import llama_small
from benchmarks.resident.rows import Row, own_limit, rows_as_json
from benchmarks.resident.table import cells
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes

MEGABYTE = 10**6
SMALL = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, pad_token_id=0
)  # fmt: skip


def test_a_peak_is_seen_after_it_has_gone_and_counts_anew() -> None:
    reset_peak()
    before = resident_bytes()
    torch.ones(25 * MEGABYTE)
    assert peak_bytes() - before > 95 * MEGABYTE
    assert resident_bytes() - before < 50 * MEGABYTE
    reset_peak()
    assert peak_bytes() - before < 50 * MEGABYTE


def row(**changes: Any) -> Row:
    values = {"owned": 10**9, "imported": 0, "peak": 10**9, "peak_limit": own_limit(10**9), "seconds": [1.0]}
    return Row("case", "way", "0", **{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"peak": 1_200_000_000}, True),
        ({"peak": 1_200_000_001}, False),
        ({"peak_limit": None}, None),
        ({"seconds": [1.0, 1.0, 21.0], "seconds_limit": 20.0}, False),
        ({"seconds": [20.0], "seconds_limit": 20.0}, True),
        ({"peak": 1_200_000_001, "seconds_limit": 20.0}, False),
    ],
)
def test_a_row_is_within_all_its_limits_or_not(changes: dict[str, Any], met: bool | None) -> None:
    judged = row(**changes)
    assert judged.met is met
    assert cells(judged)[-1] == {True: "met", False: "NOT met", None: "no target"}[met]
    (written,) = json.loads(rows_as_json([judged], {}))["rows"]
    assert written["met"] is met
    assert written["peak"] == judged.peak


def test_memory_that_is_shared_or_not_there_is_owned_once_or_not_at_all() -> None:
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, device="meta"))
    tied[1].weight = tied[0].weight
    tied.register_buffer("table", torch.zeros(5, dtype=torch.int64))
    assert owned_bytes(tied) == 4 * 64 + 8 * 5


def test_the_weights_are_those_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SHARD_BYTES", 5000)
    weights.write_weights(SMALL, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    read: Any = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    loaded, found = read
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert all(0.01 < parameter.std() < 0.03 for parameter in loaded.parameters())
    assert weights.bytes_of(SMALL) == owned_bytes(nn.ParameterList(loaded.parameters()))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(RuntimeError, match="free, and the weights need"):
        weights.write_weights(SMALL, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_process_of_its_own_measures_what_it_owns() -> None:
    measured = run_alone("benchmarks.resident.rank_program", "meta", "small", "-")
    # Besides the parameters, a rotary table.
    assert 0 <= measured["owned"] - weights.bytes_of(llama_small()) < 1000
    assert measured["owned"] < measured["peak"] < own_limit(measured["owned"]) + measured["imported"]
    assert measured["seconds"] > 0


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"-m benchmarks\.no_such_program .*failed:(.|\n)*No module named"):
        run_alone("benchmarks.no_such_program")
