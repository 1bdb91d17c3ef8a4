"""Times of first steps, on a small model."""

import torch
from transformers import LlamaConfig

from benchmarks.first_step import RANK, RANKS, hash_seconds, phases_of_start, step_seconds
from tests.support.run_ranks import run_ranks

SMALL = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=8, num_attention_heads=2)


def test_a_known_shape_takes_less_than_the_first_step() -> None:
    for first, new, known in run_ranks(RANKS, step_seconds, SMALL, range(4, 6)):
        assert len(new) == len(known) == 2
        assert min(known) < first


def test_hashes_of_a_batch_take_less_than_a_millisecond() -> None:
    assert 0 < hash_seconds({"ids": torch.zeros(2, 8, dtype=torch.int64)}, repeats=9) < 1e-3


def test_the_phases_of_a_start_without_other_ranks() -> None:
    phases = phases_of_start([RANK, "405B"])
    assert list(phases)[-3:] == ["model", "wrap and weights", "trace"]
    assert min(phases.values()) > 0
