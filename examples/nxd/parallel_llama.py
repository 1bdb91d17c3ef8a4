"""Llama of transformers with tensor-parallel layers, under the class names of transformers.

Attention and MLP are divided over the tensor-parallel ranks, and so are embedding and head. With sequence parallelism
each rank has a part of the sequence between them::

    ids (B, T) ─▶ embedding (B, T, H) ─▶ layer 0: scatter ─▶ (B, T / ranks, H) ─▶ ... ─▶ norm ─▶ head: gather ─▶ loss
"""

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLMHF
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nxdpp.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, mappings, parallel_state
from nxdpp.parallel_layers.loss_functions import parallel_cross_entropy
from nxdpp.tensor.tensor_attributes import mark_sequence_parallel


class LlamaAttention(modeling_llama.LlamaAttention):
    """Attention over this rank's heads."""

    # Any: transformers types them as torch's layers.
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def __init__(self, config: LlamaConfig, layer_idx: int, sequence_parallel: bool = False) -> None:
        super().__init__(config, layer_idx)
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = self.q_proj.out_features, self.k_proj.out_features
        size = parallel_state.get_tensor_model_parallel_size()
        if keys // self.head_dim % size:
            raise ValueError(f"{keys // self.head_dim} key-value heads do not divide over {size} tensor-parallel ranks")
        options: dict[str, Any] = {"sequence_parallel_enabled": sequence_parallel, "sequence_dimension": 1}
        self.q_proj = ColumnParallelLinear(hidden, queries, bias=bias, gather_output=False, **options)
        self.k_proj = ColumnParallelLinear(hidden, keys, bias=bias, gather_output=False, **options)
        self.v_proj = ColumnParallelLinear(hidden, keys, bias=bias, gather_output=False, **options)
        self.o_proj = RowParallelLinear(queries, hidden, bias=bias, input_is_parallel=True, **options)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **given: Any) -> Any:
        """Return the attention's output for ``(B, T, H)``, or ``(B, T / ranks, H)`` under sequence parallelism."""
        # transformers takes the length from hidden_states, which the projections gather under sequence parallelism.
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (p(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        query, key = apply_rotary_pos_emb(query, key, *given["position_embeddings"])
        mask = given["attention_mask"]
        context = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scaling,
            enable_gqa=True,
        )
        return self.o_proj(context.transpose(1, 2).flatten(2)), None


class LlamaMLP(modeling_llama.LlamaMLP):
    """MLP over this rank's inner features; its forward is transformers'."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, config: LlamaConfig, sequence_parallel: bool = False) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {
            "bias": config.mlp_bias,
            "sequence_parallel_enabled": sequence_parallel,
            "sequence_dimension": 1,
        }
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = ColumnParallelLinear(hidden, inner, gather_output=False, **options)
        self.up_proj = ColumnParallelLinear(hidden, inner, gather_output=False, **options)
        self.down_proj = RowParallelLinear(inner, hidden, input_is_parallel=True, **options)


class LlamaDecoderLayer(modeling_llama.LlamaDecoderLayer):
    """Layer whose attention and MLP are divided; the first one scatters the sequence."""

    def __init__(self, config: LlamaConfig, layer_idx: int, sequence_parallel: bool = False) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = LlamaAttention(config, layer_idx, sequence_parallel)
        self.mlp = LlamaMLP(config, sequence_parallel)
        self.scatters = sequence_parallel and layer_idx == 0
        if sequence_parallel:
            mark_sequence_parallel(self.input_layernorm)
            mark_sequence_parallel(self.post_attention_layernorm)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return hidden states ``(B, T, H)``, or ``(B, T / ranks, H)`` under sequence parallelism."""
        if self.scatters:
            hidden_states = mappings.scatter_to_sequence_parallel_region(hidden_states, 1)
        result: torch.Tensor = super().forward(hidden_states, *args, **kwargs)
        return result


class LlamaForCausalLM(LlamaForCausalLMHF):
    """Causal Llama with tensor-parallel layers.

    Raises ``ValueError`` for sizes that do not divide by the tensor-parallel size.
    """

    model: Any
    lm_head: Any

    def __init__(self, config: LlamaConfig, sequence_parallel: bool = False) -> None:
        super().__init__(config)
        hidden, vocabulary = config.hidden_size, config.vocab_size
        self.model.embed_tokens = ParallelEmbedding(vocabulary, hidden)
        for index in range(config.num_hidden_layers):
            self.model.layers[index] = LlamaDecoderLayer(config, index, sequence_parallel)
        if sequence_parallel:
            mark_sequence_parallel(self.model.norm)
        self.lm_head = ColumnParallelLinear(
            hidden,
            vocabulary,
            bias=False,
            gather_output=False,
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=1,
        )
        self.loss_function = parallel_causal_loss


def parallel_causal_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """Mean cross-entropy of the next token, from this rank's logits ``(B, T, V / ranks)`` and labels ``(B, T)``."""
    losses = parallel_cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return losses.sum() / (labels[:, 1:] != -100).sum()
