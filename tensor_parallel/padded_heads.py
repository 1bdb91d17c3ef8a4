"""Heads of zeros behind the others, for attention modules whose heads of keys and values do not divide.

Query heads stay with their heads of keys and values, so both grow by one ratio::

    6 query heads, 3 of keys and values, on 2 ranks    rank 0            rank 1
    before                                             001 1|22          does not divide
    after                                              00 11             22 pp

A padded head returns zeros, and its parameters have gradients of zero. It costs memory and computation.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.pad import get_number_of_extra_heads

# Their code takes the number of heads from the sizes of its tensors, and no parameter has a size of all heads.
CLASSES = frozenset(
    {
        "Gemma2Attention",
        "GemmaAttention",
        "GraniteAttention",
        "LlamaAttention",
        "MistralAttention",
        "MixtralAttention",
        "Qwen2Attention",
        "Qwen2MoeAttention",
        "Qwen3Attention",
        "Qwen3MoeAttention",
        "Starcoder2Attention",
    }
)
_STYLES = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


def can_pad(attention: nn.Module, styles: Mapping[str, str]) -> bool:
    """Return whether heads of ``attention``, whose modules have these ``styles``, can be padded."""
    return type(attention).__name__ in CLASSES and all(styles.get(key) == style for key, style in _STYLES.items())


def padded_sizes(found: Mapping[str, nn.Module], chosen: Mapping[str, str]) -> dict[str, int]:
    """Size of each layer along its divided dimension, for layers of attention modules whose heads are padded."""
    size = parallel_state.get_tensor_model_parallel_size()
    padded: dict[str, int] = {}
    for owner, attention in found.items():
        prefix = f"{owner}." if owner else ""
        if not can_pad(attention, {key: chosen.get(f"{prefix}{key}", "") for key in _STYLES}):
            continue
        layers: dict[str, Any] = {key: found[f"{prefix}{key}"] for key in _STYLES}
        heads = layers["k_proj"].out_features // attention.head_dim
        extra = get_number_of_extra_heads(heads, size)
        for key, layer in layers.items() if extra else ():
            features = layer.in_features if key == "o_proj" else layer.out_features
            padded[f"{prefix}{key}"] = features // heads * (heads + extra)
    return padded
