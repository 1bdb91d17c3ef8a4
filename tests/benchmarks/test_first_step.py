"""Times of first steps, on a small model."""

from transformers import LlamaConfig

from benchmarks.first_step import RANKS, step_seconds
from tests.support.run_ranks import run_ranks

SMALL = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=8, num_attention_heads=2)


def test_a_known_shape_takes_less_than_the_first_step() -> None:
    for first, new, known in run_ranks(RANKS, step_seconds, SMALL, range(4, 6)):
        assert len(new) == len(known) == 2
        assert min(known) < first
