"""A Hugging Face directory of random weights, written without ever holding the model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 * 10**8
_DISK_FACTOR = 2.1
"""The weights are saved once more beside themselves."""


def bytes_of(config: LlamaConfig) -> int:
    """Bytes of the model's parameters in fp32."""
    return sum(4 * parameter.numel() for _, parameter in _parameters(config))


def check_disk(folder: Path, needed: int) -> None:
    """Raise ``RuntimeError`` unless ``folder`` has room for ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    if free < _DISK_FACTOR * needed:
        raise RuntimeError(
            f"{folder} has {free / 1e9:.1f} GB free, and the weights need {_DISK_FACTOR * needed / 1e9:.1f} GB: set "
            f"TMPDIR to a folder that has."
        )


def write_weights(config: LlamaConfig, folder: Path) -> None:
    """Write ``config.json``, shards of about 500 MB in fp32, and their index into ``folder``."""
    check_disk(folder, bytes_of(config))
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    for number, parameters in enumerate(_shards(config)):
        file = f"model-{number:05}.safetensors"
        values = {
            name: torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)
            for name, shape in parameters.items()
        }
        save_file(values, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(values, file)
    index = {"metadata": {"total_size": bytes_of(config)}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index))


def _shards(config: LlamaConfig) -> Iterator[dict[str, torch.Size]]:
    shard: dict[str, torch.Size] = {}
    for name, parameter in _parameters(config):
        shard[name] = parameter.shape
        if sum(4 * shape.numel() for shape in shard.values()) >= _SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _parameters(config: LlamaConfig) -> Iterator[tuple[str, torch.nn.Parameter]]:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    yield from model.named_parameters()
