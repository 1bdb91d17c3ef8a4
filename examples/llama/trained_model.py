"""What a trained model writes when it is loaded from a Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch
from corpus import decode
from transformers import LlamaForCausalLM


def generate_sample(folder: Path, prompt: torch.Tensor, new_bytes: int, seed: int) -> str:
    """Load the checkpoint in ``folder`` and let it continue ``prompt``, int64 byte ids ``[bytes]``.

    Returns the continuation: up to ``new_bytes`` bytes as text, ended early by the config's
    ``eos_token_id``. Not collective.
    """
    # Any: transformers types generate() for a class that its own models do not match.
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    tokens = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=new_bytes,
        do_sample=True,
        temperature=0.7,
    )
    return decode(tokens[0, len(prompt) :].tolist())
