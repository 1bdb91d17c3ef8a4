"""Config of the Llama to train: a small one, or any from a JSON file. Nothing here is collective."""

import json
from pathlib import Path

import torch
from corpus import END_OF_FILE, VOCABULARY_SIZE
from transformers import LlamaConfig, LlamaForCausalLM


def default_config() -> LlamaConfig:
    """Config of a byte-level Llama with about 5 million parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=1024,
        # About 1/sqrt(hidden_size): with it so narrow a model learns much faster than with Llama's 0.02.
        initializer_range=0.04,
        bos_token_id=END_OF_FILE,
        eos_token_id=END_OF_FILE,
    )


def read_config(file: Path) -> LlamaConfig:
    """Read a Llama config from ``file``, which has the format of a Hugging Face ``config.json``.

    Raises ``ValueError`` for an unreadable file, another config, a model that cannot run, or a vocabulary below 256.
    """
    fields = _read_fields(file)
    model_type = fields.get("model_type", "llama")
    if model_type != "llama":
        raise ValueError(f"{file} is the config of a {model_type!r} model, not of a Llama")
    try:
        config = LlamaConfig.from_dict(fields)
        with torch.device("meta"):
            LlamaForCausalLM(config)(torch.zeros(1, 2, dtype=torch.long))
    # Wrong fields raise different errors: KeyError, AssertionError, StrictDataclassError of huggingface_hub.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"no Llama runs with {file}: {type(error).__name__}: {reason}") from error
    if config.vocab_size < VOCABULARY_SIZE:
        raise ValueError(
            f"{file} has a vocab_size of {config.vocab_size}: a token is a byte here, so it must be at least "
            f"{VOCABULARY_SIZE}"
        )
    if config.num_hidden_layers < 1:
        raise ValueError(f"{file} has num_hidden_layers {config.num_hidden_layers}: it must be at least 1")
    return config


def _read_fields(file: Path) -> dict[str, object]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    # Deeply nested lists exceed Python's recursion.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} is not a config: a JSON object is needed, it holds a {type(fields).__name__}")
    return fields
