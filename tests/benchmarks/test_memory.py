"""Memory measurements: the kernel's counts, the limits of a row, and a small run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from benchmarks.resident.measure import run_program
from benchmarks.resident.rows import Row, own_limit, rows_as_json
from benchmarks.resident.ways import SIZES, owned_bytes
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes

MEGABYTE = 10**6


def test_peak_outlasts_its_memory_until_it_is_reset() -> None:
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
def test_limits_of_a_row(changes: dict[str, Any], met: bool | None) -> None:
    judged = row(**changes)
    assert judged.met is met
    assert judged.cells()[-1] == {True: "met", False: "NOT met", None: "no target"}[met]
    (written,) = json.loads(rows_as_json([judged], {}))["rows"]
    assert written["met"] is met
    assert written["peak"] == judged.peak


def test_shared_memory_counts_once_and_meta_memory_not_at_all() -> None:
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, device="meta"))
    tied[1].weight = tied[0].weight
    tied.register_buffer("table", torch.zeros(5, dtype=torch.int64))
    assert owned_bytes(tied) == 4 * 64 + 8 * 5


@pytest.mark.sweep
def test_a_measured_process_reports_what_it_owns() -> None:
    with torch.device("meta"):
        parameters = LlamaForCausalLM(SIZES["small"]).num_parameters()
    (measured,) = run_program(1, "rank", "meta", "small", "-")
    # Besides the parameters, a rotary table.
    assert 0 <= measured["owned"] - 4 * parameters < 1000
    assert measured["owned"] < measured["peak"] < own_limit(measured["owned"]) + measured["imported"]
    assert measured["seconds"] > 0


def test_a_failed_process_raises_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no memory; exit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(broken))
    with pytest.raises(RuntimeError, match=r"program rank meta small - failed:\nno memory"):
        run_program(1, "rank", "meta", "small", "-")
