"""The main job at the smallest size: configuration fields of its Llama, and files of a short text."""

import json
import sys
from pathlib import Path
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


def files_of(folder: Path, **fields: Any) -> list[str]:
    """Write a config with ``fields`` and two texts; return the flags of a run in ``folder`` with them."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({**TINY_LLAMA, **fields}))
    texts = [folder.with_name(f"{name}.txt") for name in ("train", "held_out")]
    for text in texts:
        text.write_bytes(bytes(range(32, 120)) * 30)
    return ["--config", str(config), "--data", *map(str, texts), "--output", str(folder)]


def run_main_job(arguments: list[str]) -> None:
    """Run ``train.py`` in this rank."""
    import train

    # The script names the device of its model itself.
    with pytest.MonkeyPatch.context() as patch, torch.device("cpu"):
        patch.setattr(sys, "argv", ["train.py", *arguments])
        train.main()
