"""A sample of the trained model: its continuation of held-out text."""

from typing import Any

import torch
from corpus import decode
from rich.console import Console
from rich.text import Text
from settings import Settings
from transformers import LlamaForCausalLM

PROMPT_BYTES, SAMPLE_BYTES = 48, 240


def print_sample(console: Console, settings: Settings) -> None:
    """Load the saved checkpoint with transformers, and let it continue the start of the held-out text."""
    length = min(PROMPT_BYTES, settings.seq_length // 2)
    new_bytes = min(SAMPLE_BYTES, settings.config.max_position_embeddings - length)
    prompt = torch.tensor(list(settings.corpus.held_out[:length]))
    # Any: transformers types generate() for a class that its own models do not match.
    model: Any = LlamaForCausalLM.from_pretrained(settings.output)
    torch.manual_seed(settings.seed)
    tokens = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=new_bytes,
        do_sample=True,
        temperature=0.7,
    )
    sample = decode(tokens[0, length:].tolist())
    console.rule("a sample from the checkpoint")
    for title, text in (("prompt, from held-out text:", decode(prompt.tolist())), ("continuation:", sample)):
        console.print(Text(title, "bold"))
        console.print(Text(text))
