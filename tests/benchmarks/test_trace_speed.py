"""What is timed is the construction and the first steps of a pipeline, on a small model."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.trace_speed import STAGES, construct, measure, step_seconds

SMALL = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=STAGES, num_attention_heads=2
)  # fmt: skip


def test_all_parts_are_timed() -> None:
    assert all(seconds > 0 for seconds in measure(SMALL))


def test_a_second_step_finds_all_made() -> None:
    with torch.device("meta"):
        cache = construct(LlamaForCausalLM(SMALL))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    first, second = (step_seconds(cache, {"input_ids": ids, "labels": ids}) for _ in range(2))
    assert second < first
