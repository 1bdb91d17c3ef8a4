"""x-transformers: language models and a vision transformer with its many options."""

from functools import partial
from typing import Any

from torch import nn
from x_transformers import Decoder, Encoder, TransformerWrapper, ViTransformerWrapper

from tools.zoo.libraries.case import CLASSES, Case, Classified, NextToken, images, tokens

_LAYERS = ["Attention", "FeedForward"]
_SIZES = {"dim": 32, "depth": 4, "heads": 2, "attn_dim_head": 16}


def _decoder(wrapper: dict[str, Any], settings: dict[str, Any]) -> nn.Module:
    layers = Decoder(**(_SIZES | settings))
    return NextToken(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers, **wrapper))


def _language_model(wrapper: dict[str, Any] | None = None, **settings: Any) -> Case:
    return Case(partial(_decoder, wrapper or {}, settings), tokens(), _LAYERS)


def _vision() -> nn.Module:
    return Classified(
        ViTransformerWrapper(image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=Encoder(**_SIZES))
    )


CASES = {
    "decoder": _language_model(),
    "rotary": _language_model(rotary_pos_emb=True),
    "rotary xpos": _language_model(rotary_xpos=True),
    "alibi": _language_model(alibi_pos_bias=True, alibi_num_heads=1),
    "T5 relative positions": _language_model(rel_pos_bias=True),
    "dynamic positions": _language_model(dynamic_pos_bias=True, dynamic_pos_bias_log_distance=False),
    "RMSNorm": _language_model(use_rmsnorm=True),
    "ScaleNorm": _language_model(use_scalenorm=True),
    "SwiGLU": _language_model(ff_swish=True, ff_glu=True),
    "no bias in feed-forward": _language_model(ff_no_bias=True),
    "grouped queries": _language_model(attn_kv_heads=1),
    "multi-query": _language_model(attn_one_kv_head=True),
    "query-key norm": _language_model(attn_qk_norm=True),
    "flash": _language_model(attn_flash=True),
    "talking heads": _language_model(attn_pre_talking_heads=True),
    "sparse top-k": _language_model(attn_sparse_topk=4),
    "gated values": _language_model(attn_gate_values=True),
    "residual attention": _language_model(residual_attn=True),
    "macaron": _language_model(macaron=True),
    "sandwich norm": _language_model(sandwich_norm=True),
    "post-norm": _language_model(pre_norm=False),
    "gated residual": _language_model(gate_residual=True),
    "scaled residual": _language_model(scale_residual=True),
    "shifted tokens": _language_model(shift_tokens=1),
    "memory key-values": _language_model(attn_num_mem_kv=4),
    "hyper-connections": _language_model(num_residual_streams=2),
    "memory tokens": _language_model({"num_memory_tokens": 4}),
    "tied embedding": _language_model({"tie_embedding": True}),
    "embedding norm": _language_model({"post_emb_norm": True}),
    "no absolute positions": _language_model({"use_abs_pos_emb": False}, rotary_pos_emb=True),
    "vision": Case(_vision, images(), _LAYERS),
}
