"""Rules that shrink any configuration class: small values from the names and defaults of fields."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
FIRST_TOKEN = 32  # ids below are special tokens
HIDDEN = 64
FEED_FORWARD = 128
HEADS = 4
HEAD_DIM = 16
EXPERTS = 4
POSITIONS = 128
WINDOW = 8
IMAGE = 64
PATCH = 8

Value = Any
Rule = int | Callable[[int], int]

COUNTS_LAYERS = re.compile(
    r"(num_hidden_layers|n_layers?|num_(en|de)coder_layers|(speech_|t2u_)?(en|de)coder_layers|num_layers|num_blocks"
    r"|num_layers_per_stack|depth)"
)
SPECIAL_TOKEN = re.compile(r".*(token_id|token_index|_idx)|(mask|pad|eos|bos|unk)_index")
RANDOM = re.compile(r".*(drop|jitter|mask_time_prob|mask_feature_prob).*")

KEY_VALUE_HEADS = re.compile(r".*(key_value_heads|kv_n_heads|kv_heads)")

RULES: list[tuple[str, Rule]] = [
    (r".*vocab_size.*|.*_group_vocab", VOCABULARY),
    (r"(hidden|input|word|embedding|d)_?(embed|embedding)?_?(size|model|proj_dim)|n_embd|d_model|(emb_)?dim", HIDDEN),
    (r"hidden_size_global|(input|output)_embedding_size|d_latents|lru_width|attention_hidden_size", HIDDEN),
    (r"(pooler|prediction|audio|encoder|decoder|backbone|cross_attention)_(hidden|head)_size", HIDDEN),
    (
        r"(pooler_output|adapter_(in|out|input)|projection|projector_(in|out)put|vision_output|output)_(size|dim)",
        HIDDEN,
    ),
    (r"out_hidden_size|pooler_hidden_size|(pronunciation|shape|lang|unit|spkr)_embed_dim|entity_emb_size", HIDDEN),
    (r".*intermediate_size(_mlp)?|.*(ffn|feed_forward)_(dim|size|hidden_size)|d_?ff|dim_ff|mlp_dim", FEED_FORWARD),
    (r"hidden_dim|d_inner|expert_ffn_hidden_size|mamba_d_ssm", FEED_FORWARD),
    (r"hidden_size_per_layer_input|laurel_rank|embedding_rank|router_hidden_size|adapter_rank|.*lowrank", 16),
    (r".*lora_rank|gated_norm_rank|embedding_size|true_hidden_size|intra_bottleneck_size", 16),
    (r"mamba_(n|num)_heads|mamba_num_heads", 2 * HEADS),
    (r".*(attention_heads|n_heads?|num_heads|num_key_heads|num_value_heads)", HEADS),
    (r"qk_rope_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"qk_head_dim", HEAD_DIM + HEAD_DIM // 2),
    (r".*(head_dim|d_head|d_kv|dim_head|kv_channels|headdim|attention_head_size)", HEAD_DIM),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", EXPERTS),
    (r".*(experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts)", lambda default: min(default, 2)),
    (r"num_experts?_groups?|n_group|topk_group", 1),
    (r".*num_shared_experts|n_shared_experts", lambda default: min(default, 1)),
    (r"zero_expert_num", 2),
    (
        r"(max_.*position.*|n_positions|n_ctx|max_(seq|pos)_?(len|emb|length)?|context_length|model_max_length)",
        POSITIONS,
    ),
    (r".*(sliding_window(_size)?|attention_window(_size|_len)?|attention_chunk_size|local_attention)", WINDOW),
    (r"index_topk|(mamba_)?chunk_size|local_radius|global_block_size|block_size", WINDOW),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"(mamba_)?n_?groups", 1),
    (r"(.*_)?state_size|mamba_d_state|.*dt_rank|time_step_rank", HEAD_DIM),
    (r"embed_dim", 24),
    (r"num_query_groups", HEADS),
    (r"context_size|max_num_tiles", WINDOW),
    (r"image_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_mel_bins|input_feat_size|feature_size", 16),
]


def shrink(config_class: type[PreTrainedConfig], layers: int, special: dict[str, Value]) -> PreTrainedConfig:
    """A small configuration of ``config_class`` with ``layers`` layers in each stack.

    ``special`` overrides the rules. A dictionary under the name of a sub-configuration (``text_config``) overrides its
    rules.
    """
    default = vars(config_class(**special))
    fields = {field.name: _declared(field) for field in dataclasses.fields(config_class)}
    small = {name: value for name, value in special.items() if name not in fields}
    for name, declared in fields.items():
        value = default.get(name)
        if isinstance(value, PreTrainedConfig):
            small[name] = shrink(type(value), layers, special.get(name, {}))
        elif name in special:
            small[name] = special[name]
        elif isinstance(value, list | tuple) and "depths" not in fields and len(value) == _layers_of(default):
            small[name] = _covering(value, layers)
        elif declared is not None:
            small[name] = _small(name, declared, layers)
            if KEY_VALUE_HEADS.fullmatch(name):
                small[name] = HEADS if declared == fields.get("num_attention_heads") else min(declared, HEADS // 2)
        elif value is None and name == "head_dim":
            small[name] = HEAD_DIM
    return config_class(**small)


def _declared(field: "dataclasses.Field[Any]") -> Value:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _layers_of(default: dict[str, Value]) -> int | None:
    counts = (default.get(name) for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"))
    return next((count for count in counts if isinstance(count, int)), None)


def _covering(per_layer: list[Value] | tuple[Value, ...], layers: int) -> list[Value]:
    """One value for each layer, cycling through the distinct values in their order."""
    distinct = [value for index, value in enumerate(per_layer) if value not in per_layer[:index]]
    return [distinct[index % len(distinct)] for index in range(layers)]


def _small(name: str, default: Value, layers: int) -> Value:
    if RANDOM.fullmatch(name) and not isinstance(default, bool):
        return _without_randomness(default)
    if SPECIAL_TOKEN.fullmatch(name):
        return _special_token(name, default)
    if isinstance(default, list | tuple):
        return _small_list(name, default)
    if isinstance(default, bool) or not isinstance(default, int):
        return default
    if COUNTS_LAYERS.fullmatch(name):
        return layers
    for pattern, value in RULES:
        if re.fullmatch(pattern, name):
            return min(default, value) if isinstance(value, int) else value(default)
    return default


def _small_list(name: str, default: list[Value] | tuple[Value, ...]) -> list[Value] | tuple[Value, ...]:
    """Shrink a list. Vision models have a depth and a width for each stage; shifted windows need two layers a stage."""
    if name == "depths":
        return type(default)(min(depth, 2) for depth in default)
    if name == "hidden_sizes":
        return type(default)(size // 4 for size in default)
    if name == "image_size":
        return type(default)(IMAGE for _ in default)
    return default


def _without_randomness(default: Value) -> Value:
    if isinstance(default, list | tuple):
        return type(default)(0.0 for _ in default)
    return type(default)(0) if isinstance(default, int | float) else default


def _special_token(name: str, default: Value) -> Value:
    """The default if it is small, otherwise an id that depends on the name, so that names rarely share one."""
    if isinstance(default, list):
        return [_special_token(name, token) for token in default]
    if not isinstance(default, int) or default < FIRST_TOKEN // 2:
        return default
    return FIRST_TOKEN // 2 + sum(name.encode()) % (FIRST_TOKEN // 2)
