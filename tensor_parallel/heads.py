"""Check that the heads of attention modules divide over the tensor-parallel ranks."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.tensor_parallel.padded_heads import can_pad

_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
_OF_HEADS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "q_b_proj", "kv_b_proj", "c_attn")


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
                    f"{name} has {heads} heads ({words}), which do not divide over {size} tensor-parallel ranks: "
                    f"{padding}use a tensor-parallel size that divides {heads}, or leave {owner} whole by a plan= "
                    f"without its modules"
                )


def _heads(attention: Any, projection: Any) -> dict[str, int]:
    """Numbers of heads, each with the attribute that tells it."""
    counts = {name: getattr(attention, name, None) for name in _COUNTS}
    found = {name: count for name, count in counts.items() if isinstance(count, int) and not isinstance(count, bool)}
    width = getattr(projection, "out_features", None)
    for name in _SIZES:
        head = getattr(attention, name, None)
        if isinstance(head, int) and head and width and width % head == 0:
            found[f"{width} / {name}={head}"] = width // head
    return found
