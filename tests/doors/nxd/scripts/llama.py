"""A tiny Llama over parallel layers, built as NeuronX Distributed's Llama scripts build theirs."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    repeat_kv,
)

import nxdpp.parallel_layers.utils as neuronx_dist_utils
from nxdpp.kernels.flash_attn import nki_flash_attn_func
from nxdpp.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxdpp.overrides.transformer_overrides import apply_rotary_pos_emb
from nxdpp.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.parallel_layers.loss_functions import parallel_cross_entropy
from nxdpp.parallel_layers.parallel_state import (
    get_context_model_parallel_rank,
    get_tensor_model_parallel_size,
)

VOCABULARY = 64


def llama_config(**options: Any) -> LlamaConfig:
    """The configuration, with the scripts' own options."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    config.use_cache = False
    own = {
        "return_dict": False,
        "sequence_parallel_enabled": False,
        "qkv_linear": False,
        "selective_checkpoint_enabled": False,
        "kv_shared_group_size": 1,
        "use_flash_attention": False,
        "fuse_qkv": True,
        "transpose_nki_inputs": True,
        "dtype": torch.float32,
    }
    for name, value in (own | options).items():
        setattr(config, name, value)
    config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _init_normal(std: float, weight: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(weight, mean=0.0, std=std)


def _options(config: Any) -> dict[str, Any]:
    return {
        "init_method": partial(_init_normal, config.initializer_range),
        "sequence_parallel_enabled": config.sequence_parallel_enabled,
        "dtype": config.dtype,
    }


class RMSNorm(LlamaRMSNorm):
    """Its weight is marked."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, sequence_parallel_enabled: bool = False) -> None:
        super().__init__(hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel_enabled", sequence_parallel_enabled)  # noqa: B010  # as scripts do


class MLP(nn.Module):
    """Gate and up in one layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.act_fn = config, ACT2FN[config.hidden_act]
        size = config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, 2 * size, stride=2, bias=False, gather_output=False, **_options(config)
        )
        self.down_proj = RowParallelLinear(
            size, config.hidden_size, bias=False, input_is_parallel=True, **_options(config)
        )
        self.split_size = size // get_tensor_model_parallel_size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).split(self.split_size, dim=2)

        def activation_mlp(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            activated: torch.Tensor = self.act_fn(gate)
            return activated * up

        if self.config.selective_checkpoint_enabled:
            intermediate = checkpoint(activation_mlp, gate, up, use_reentrant=False)
        else:
            intermediate = activation_mlp(gate, up)
        down: torch.Tensor = self.down_proj(intermediate)
        return down


class CoreAttention(nn.Module):
    """The part of attention that scripts recompute."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[-1])
        length = query.shape[2]
        mask = torch.triu(torch.ones((1, 1, length, length), device=query.device), diagonal=1).bool()
        weights = weights.masked_fill_(mask, -10000.0)
        return torch.matmul(functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype), value)


class Attention(nn.Module):
    """Fused queries, keys and values, or one layer for grouped heads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        size = config.hidden_size
        options: dict[str, Any] = {"bias": False, "gather_output": False, **_options(config)}
        if config.qkv_linear:
            self.qkv_proj: nn.Module = GQAQKVColumnParallelLinear(
                size,
                [heads * self.head_dim, groups * self.head_dim],
                kv_size_multiplier=config.kv_shared_group_size,
                fuse_qkv=config.fuse_qkv,
                **options,
            )
        else:
            self.qkv_proj = ColumnParallelLinear(size, 3 * heads * self.head_dim, stride=3, **options)
            self.split_size = heads * self.head_dim // get_tensor_model_parallel_size()
        self.o_proj = RowParallelLinear(
            heads * self.head_dim, size, bias=False, input_is_parallel=True, **_options(config)
        )
        tensor = get_tensor_model_parallel_size()
        self.num_heads = neuronx_dist_utils.divide(heads, tensor)
        self.num_key_value_heads = neuronx_dist_utils.divide(groups * config.kv_shared_group_size, tensor)
        self.core_attn = CoreAttention()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        config, tensor = self.config, get_tensor_model_parallel_size()
        batch, length = hidden_states.shape[:2]
        if config.sequence_parallel_enabled:
            length, batch = hidden_states.shape[0] * tensor, hidden_states.shape[1]
        if config.qkv_linear:
            states = self.qkv_proj(hidden_states)
        else:
            states = self.qkv_proj(hidden_states).split(self.split_size, dim=2)
        query, key, value = (self._permuted(each, batch, length) for each in states)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(
            query, key, cos, sin, None, config.use_flash_attention, config.transpose_nki_inputs
        )
        groups = self.num_heads // self.num_key_value_heads
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        output = self._attend(query, key, value)
        assert output.shape == (batch, self.num_heads, length, self.head_dim)
        if config.sequence_parallel_enabled:
            output = output.permute(2, 0, 1, 3).reshape(length, batch, config.hidden_size // tensor)
        else:
            output = output.transpose(1, 2).contiguous().reshape(batch, length, config.hidden_size // tensor)
        return self.o_proj(output), None

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.config.use_flash_attention:
            transpose = self.config.transpose_nki_inputs
            return nki_flash_attn_func(query, key, value, transpose_nki_inputs=transpose)
        attended: torch.Tensor = self.core_attn(query, key, value)
        return attended

    def _permuted(self, states: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        config, flash = self.config, self.config.use_flash_attention and self.config.transpose_nki_inputs
        if config.sequence_parallel_enabled:
            order = (1, 2, 3, 0) if flash else (1, 2, 0, 3)
            return states.view(length, batch, -1, self.head_dim).permute(order)
        return states.view(batch, length, -1, self.head_dim).permute((0, 2, 3, 1) if flash else (0, 2, 1, 3))


class Layer(LlamaDecoderLayer):
    """The forward of transformers over the parts above."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.add_module("self_attn", Attention(config=config))
        self.add_module("mlp", MLP(config))
        parallel = config.sequence_parallel_enabled
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, sequence_parallel_enabled=parallel)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, sequence_parallel_enabled=parallel
        )


class Rotary(LlamaRotaryEmbedding):
    """A class of its own, as in scripts, which make it anew in ``init_weights``."""


class Model(LlamaPreTrainedModel):
    """Embedding, layers and norm."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, **_options(config)
        )
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(
            config.hidden_size,
            eps=config.rms_norm_eps,
            sequence_parallel_enabled=config.sequence_parallel_enabled,
        )
        self.rotary_emb = Rotary(config=config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        length = input_ids.shape[1]
        start = get_context_model_parallel_rank() * length
        positions = torch.arange(start, start + length, dtype=torch.long, device=input_ids.device)
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, positions.unsqueeze(0).view(-1, length))
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=positions,
                past_key_value=None,
                output_attentions=False,
                use_cache=False,
                position_embeddings=position_embeddings,
            )
        normed: torch.Tensor = self.norm(hidden_states)
        return normed


class LlamaForCausalLM(LlamaPreTrainedModel):
    """The model with its head and loss."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=False, **_options(config)
        )
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, attention_mask=attention_mask))
        if self.config.sequence_parallel_enabled:
            logits = logits.transpose(0, 1).contiguous()
        logits = logits.to(torch.float32)
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].clone().contiguous()
            shift_logits = shift_logits.view(-1, shift_logits.size(-1))
            shift_labels = labels[..., 1:].contiguous().view(-1).to(shift_logits.device)
            per_token = parallel_cross_entropy(shift_logits, shift_labels)
            valid = (shift_labels != -100).float()
            loss = (per_token * valid).sum() / valid.sum().clamp_min(1.0)
        if not self.config.return_dict:
            return (loss, logits) if loss is not None else (logits,)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def init_weights(module: nn.Module, device: torch.device) -> None:
    """Initial values after the construction on the meta device, buffers of rotary tables too."""
    for key, nested in module._modules.items():
        if isinstance(nested, Rotary):
            module._modules[key] = Rotary(nested.config)
    if isinstance(module, RMSNorm):
        module.weight.data.fill_(1.0)
    elif isinstance(module, ParallelEmbedding | RowParallelLinear | ColumnParallelLinear):
        module.init_weight_cpu()
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias.data.zero_()
    elif isinstance(module, GQAQKVColumnParallelLinear):
        module.initialize_weight_biases()
