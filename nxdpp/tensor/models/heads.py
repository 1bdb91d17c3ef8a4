"""Heads of attention modules divide over the tensor-parallel ranks, or get heads of zeros behind them.

Query heads stay with their heads of keys and values, so both grow by one ratio::

    6 query heads, 3 of keys and values, on 2 ranks    rank 0            rank 1
    before                                             001 1|22          does not divide
    after                                              00 11             22 pp

A padded head returns zeros, and its parameters have gradients of zero. It costs memory and computation.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nxdpp.counted import counted
from nxdpp.ranks import parallel_state
from nxdpp.tensor.pad import get_number_of_extra_heads

# Their code takes the number of heads from the sizes of its tensors, and no parameter has a size of all heads.
_PADDED = "Gemma Gemma2 Granite Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Starcoder2"
CLASSES = frozenset(f"{name}Attention" for name in _PADDED.split())
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
_OF_HEADS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "q_b_proj", "kv_b_proj", "c_attn")
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


def check_heads(found: Mapping[str, nn.Module], chosen: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for an attention whose heads, or heads of keys and values, do not divide."""
    size = parallel_state.get_tensor_model_parallel_size()
    for name, style in chosen.items():
        # The layer under an adapter has one name more.
        owner, _, key = name.removesuffix(".base_layer").rpartition(".")
        if style not in ("colwise", "packed_colwise") or key not in _OF_HEADS:
            continue
        for words, heads in _heads(found[owner], found[name]).items():
            if heads % size:
                styles = {inner.rpartition(".")[2]: chosen[inner] for inner in chosen if inner.startswith(f"{owner}.")}
                padding = "give pad_heads=True, which adds heads of zeros, " if can_pad(found[owner], styles) else ""
                raise ValueError(
                    f"{name} has {counted(heads, 'head')} ({words}), which do not divide over {size} tensor-parallel "
                    f"ranks: {padding}use a tensor-parallel size that divides {heads}, or leave {owner} whole by a "
                    "plan= without its modules"
                )


def _heads(attention: Any, projection: Any) -> dict[str, int]:
    """Numbers of heads, each with the attribute that holds it."""
    counts = {name: getattr(attention, name, None) for name in _COUNTS}
    found = {name: count for name, count in counts.items() if isinstance(count, int) and not isinstance(count, bool)}
    width = getattr(projection, "out_features", None)
    for name in _SIZES:
        head = getattr(attention, name, None)
        if isinstance(head, int) and head and width and width % head == 0:
            found[f"{width} / {name}={head}"] = width // head
    return found
