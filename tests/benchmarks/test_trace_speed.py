"""CPU times of traces, on a small model."""

import pytest

from benchmarks.trace_speed import ROOT, ROWS, measure

pytestmark = pytest.mark.sweep

SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 2}


def test_every_row_is_timed() -> None:
    (rows,) = measure([ROOT], SMALL, 2)
    assert tuple(rows) == ROWS
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in rows.values())
