"""The configuration of Llama-3.1-405B, for tests and benchmarks that allocate none of it."""

from transformers import LlamaConfig

LAYERS = 126


def llama_3_1_405b(layers: int = LAYERS) -> LlamaConfig:
    """Llama-3.1-405B as published, or with fewer layers."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
