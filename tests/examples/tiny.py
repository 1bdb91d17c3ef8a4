"""The main job at the smallest size: configuration fields of its Llama, few sequences to evaluate, a short sample."""

from typing import Any

import pytest
import torch

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

HELD_OUT = 16
"""Sequences of an evaluation."""

SAMPLE = 8
"""Bytes of a sample."""


def run_main_job(arguments: list[str]) -> None:
    """Run ``train.py`` in this rank."""
    import sample
    import train
    import training

    # The script names the device of its model itself.
    with pytest.MonkeyPatch.context() as patch, torch.device("cpu"):
        patch.setattr(training, "HELD_OUT_SEQUENCES", HELD_OUT)
        patch.setattr(sample, "SAMPLE_BYTES", SAMPLE)
        train.main(arguments)
