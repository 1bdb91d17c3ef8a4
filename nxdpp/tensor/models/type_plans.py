"""Plans of the types whose configuration carries none.

Names are the base model's. Modules that no plan names stay whole: poolers, projections of embeddings, heads.
A head that is tied to the embedding is divided with it.
"""

from collections.abc import Iterable


def _plan(embeddings: str, *layers: tuple[str, Iterable[str], str]) -> dict[str, str]:
    """Return the plan of ``embeddings``, and of modules that divide hidden states and the one that joins them again.

    ``layers`` has the prefix of their names, the names of the modules that divide, and the name of the one that joins.
    """
    plan = {embeddings: "embedding_rowwise"}
    for prefix, columns, row in layers:
        plan |= {f"{prefix}.{name}": "colwise" for name in columns} | {f"{prefix}.{row}": "rowwise"}
    return plan


def _encoder(layers: str = "encoder.layer.*") -> dict[str, str]:
    """Return the plan of BERT and of the types with its names."""
    heads = ("self.query", "self.key", "self.value")
    return _plan(
        "embeddings.word_embeddings",
        (f"{layers}.attention", heads, "output.dense"),
        (f"{layers}.crossattention", heads, "output.dense"),
        (layers, ("intermediate.dense",), "output.dense"),
    )


def _encoder_and_decoder() -> dict[str, str]:
    """Return the plan of BART and of the types with its names."""
    heads = ("q_proj", "k_proj", "v_proj")
    plan = _plan(
        "shared",
        ("encoder.layers.*.self_attn", heads, "out_proj"),
        ("decoder.layers.*.self_attn", heads, "out_proj"),
        ("decoder.layers.*.encoder_attn", heads, "out_proj"),
        ("encoder.layers.*", ("fc1",), "fc2"),
        ("decoder.layers.*", ("fc1",), "fc2"),
    )
    # A decoder by itself has no shared embedding.
    return plan | {f"{stack}.embed_tokens": "embedding_rowwise" for stack in ("encoder", "decoder")}


_ALBERT_LAYER = "encoder.albert_layer_groups.*.albert_layers.*"
_T5_LAYER = "block.*.layer.*"
PLANS: dict[str, dict[str, str]] = {
    "albert": _plan(
        "embeddings.word_embeddings",
        (f"{_ALBERT_LAYER}.attention", ("query", "key", "value"), "dense"),
        (_ALBERT_LAYER, ("ffn",), "ffn_output"),
    ),
    "bart": _encoder_and_decoder(),
    "bert": _encoder(),
    "blenderbot": _encoder_and_decoder(),
    "blenderbot-small": _encoder_and_decoder(),
    "electra": _encoder(),
    "gpt2": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.c_attn": "packed_colwise",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "gpt_neo": _plan(
        "wte",
        ("h.*.attn.attention", ("q_proj", "k_proj", "v_proj"), "out_proj"),
        ("h.*.mlp", ("c_fc",), "c_proj"),
    ),
    "gptj": _plan(
        "wte",
        ("h.*.attn", ("q_proj", "k_proj", "v_proj"), "out_proj"),
        ("h.*.mlp", ("fc_in",), "fc_out"),
    ),
    "roberta": _encoder(),
    "t5": _plan(
        "shared",
        (f"encoder.{_T5_LAYER}.SelfAttention", ("q", "k", "v"), "o"),
        (f"decoder.{_T5_LAYER}.SelfAttention", ("q", "k", "v"), "o"),
        (f"decoder.{_T5_LAYER}.EncDecAttention", ("q", "k", "v"), "o"),
        (f"encoder.{_T5_LAYER}.DenseReluDense", ("wi", "wi_0", "wi_1"), "wo"),
        (f"decoder.{_T5_LAYER}.DenseReluDense", ("wi", "wi_0", "wi_1"), "wo"),
    )
    | {
        f"{stack}.{_T5_LAYER}.{attention}.relative_attention_bias": "embedding_heads"
        for stack, attention in (
            ("encoder", "SelfAttention"),
            ("decoder", "SelfAttention"),
            ("decoder", "EncDecAttention"),
        )
    },
}
"""Plan of each type. All classes of a type are compared with one process (``tests/tensor/models``)."""
