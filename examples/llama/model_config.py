"""Which Llama to train: the example's own small one, or any from a JSON file.

Nothing here is collective.
"""

import json
from pathlib import Path

import torch
from corpus import END_OF_FILE, VOCABULARY_SIZE
from transformers import LlamaConfig, LlamaForCausalLM


def default_config() -> LlamaConfig:
    """A byte-level Llama of about 5 million parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=1024,
        # Near 1/sqrt(hidden_size): a model this narrow learns much faster from it than from Llama's 0.02.
        initializer_range=0.04,
        bos_token_id=END_OF_FILE,
        eos_token_id=END_OF_FILE,
    )


def read_config(file: Path) -> LlamaConfig:
    """The Llama config in ``file``, in the form of a Hugging Face ``config.json``.

    Raises ``ValueError`` for a file that cannot be read, is no Llama config, describes a model that cannot
    run, or has a vocabulary of fewer ids than there are bytes.
    """
    fields = _read_fields(file)
    model_type = fields.get("model_type", "llama")
    if model_type != "llama":
        raise ValueError(f"{file} is the config of a {model_type!r} model, not of a Llama")
    try:
        config = LlamaConfig.from_dict(fields)
        with torch.device("meta"):
            LlamaForCausalLM(config)(torch.zeros(1, 2, dtype=torch.long))
    # Each field fails in its own way: KeyError, AssertionError, huggingface_hub's StrictDataclassError.
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
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} is not a config: a JSON object is needed, it holds a {type(fields).__name__}")
    return fields
