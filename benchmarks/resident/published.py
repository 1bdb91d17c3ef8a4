"""The configurations that memory is measured with."""

from functools import partial

from transformers import LlamaConfig

LLAMA_3_1_405B_STAGES = 16


def llama_1b(tied: bool = False) -> LlamaConfig:
    """1.03 billion parameters, so that each of 4 ranks has about 1 GB of them in fp32; or with one embedding."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=20,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
    )


def llama_small() -> LlamaConfig:
    """76 million parameters, to see that all works."""
    return LlamaConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


SIZES = {"1b": llama_1b, "1b-tied": partial(llama_1b, tied=True), "small": llama_small}
WITH_TARGETS = ("1b", "1b-tied")
"""Beside the small model, what is imported is more than the limits leave."""
