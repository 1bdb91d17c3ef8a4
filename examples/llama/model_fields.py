"""Fields of the config of the Llama to train: a small one, or any from a JSON file; without torch."""

import json
from pathlib import Path
from typing import Any

from corpus import END_OF_FILE, VOCABULARY_SIZE


def default_fields() -> dict[str, Any]:
    """Fields of a byte-level Llama with about 5 million parameters."""
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        # About 1/sqrt(hidden_size): with it such a narrow model learns much faster than with Llama's 0.02.
        "initializer_range": 0.04,
        "bos_token_id": END_OF_FILE,
        "eos_token_id": END_OF_FILE,
    }


def read_fields(file: Path) -> dict[str, Any]:
    """Read the fields of a Llama from ``file``, which has the format of a Hugging Face ``config.json``.

    Raises ``ValueError`` for an unreadable file, a different model, no layers, or a vocabulary below 256.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    # Deeply nested lists exceed Python's recursion.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} is not a config: a JSON object is needed, it holds a {type(fields).__name__}")
    model_type = fields.get("model_type", "llama")
    if model_type != "llama":
        raise ValueError(f"{file} is the config of a {model_type!r} model, not of a Llama")
    check_fields(fields, file)
    return fields


def check_fields(fields: dict[str, Any], file: Path) -> None:
    """Raise ``ValueError`` for too few layers or ids in the ``fields`` that exist."""
    if isinstance(size := fields.get("vocab_size"), int) and size < VOCABULARY_SIZE:
        raise ValueError(
            f"{file} has a vocab_size of {size}: a token is a byte here, so it must be at least {VOCABULARY_SIZE}"
        )
    if isinstance(layers := fields.get("num_hidden_layers"), int) and layers < 1:
        raise ValueError(f"{file} has num_hidden_layers {layers}: it must be at least 1")
