"""Plans of ours: for types whose configuration carries none, and rules that plans of transformers lack.

Names are those in the base model. Heads have their own names in the whole model.
"""

from typing import Any

PLANS: dict[str, dict[str, str]] = {
    "bert": {
        "embeddings.word_embeddings": "embedding_rowwise",
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.crossattention.self.query": "colwise",
        "encoder.layer.*.crossattention.self.key": "colwise",
        "encoder.layer.*.crossattention.self.value": "colwise",
        "encoder.layer.*.crossattention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
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
    "t5": {
        "shared": "embedding_rowwise",
        **{
            f"{stack}.block.*.layer.*.{attention}.{key}": style
            for stack, attention in (
                ("encoder", "SelfAttention"),
                ("decoder", "SelfAttention"),
                ("decoder", "EncDecAttention"),
            )
            for key, style in (
                ("q", "colwise"),
                ("k", "colwise"),
                ("v", "colwise"),
                ("o", "rowwise"),
                ("relative_attention_bias", "embedding_heads"),
            )
        },
        **{
            f"{stack}.block.*.layer.*.DenseReluDense.{key}": style
            for stack in ("encoder", "decoder")
            for key, style in (("wi", "colwise"), ("wi_0", "colwise"), ("wi_1", "colwise"), ("wo", "rowwise"))
        },
    },
}
"""Plan of each type that has none."""

ADDED: dict[str, dict[str, str]] = {
    # The parameters of its activation see this rank's features only.
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
}
"""Rules beside the plan of a type."""

COUNTS_OF_HEADS: dict[str, tuple[str, ...]] = {
    "GPT2Attention": ("split_size",),
    "T5Attention": ("n_heads", "inner_dim"),
}
"""Attributes of an attention module that its code takes for the size of its own heads."""


def plan_of(model: Any) -> dict[str, str]:
    """The plan of ``model`` with the names in ``model``: of transformers, or ours; empty if there is none."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    base = getattr(model, "base_model", model)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    if model_type in PLANS:
        return {f"{prefix}{name}": style for name, style in PLANS[model_type].items()}
    plan = dict(getattr(model, "_tp_plan", None) or {})
    added = ADDED.get(model_type, {}) if plan else {}
    return plan | {f"{prefix}{name}": style for name, style in added.items()}
