"""Attention of transformers' modules for a part of each sequence.

A module calls the function of transformers' ``AttentionInterface`` that its configuration names. Here this function, of
SDPA, eager or flex, runs as in one process, for some of the heads::

    module ── q, k, v of own tokens ─▶ to_heads ─▶ the function, with the whole mask ─▶ to_tokens ─▶ module
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nxdpp.context.cut import own_places
from nxdpp.context.exchange import to_heads, to_tokens
from nxdpp.context.mixer import gathered
from nxdpp.context.sequence import sequences
from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import has_values

_EAGER = "eager_attention_forward"


@cache
def divide_attention() -> None:
    """Let layers over context ranks divide the attention of SDPA, eager and flex; other callers have it as it was."""
    for name in ("sdpa", "flex_attention"):
        AttentionInterface.register(name, partial(_attention, ALL_ATTENTION_FUNCTIONS[name]))
    AttentionInterface.register("eager", partial(_attention, None))


def _eager(module: nn.Module) -> Callable[..., Any]:
    """Return the function that is the eager attention of the type of ``module``, by transformers' convention."""
    for kind in type(module).__mro__:
        if (found := getattr(sys.modules[kind.__module__], _EAGER, None)) is not None:
            function: Callable[..., Any] = found
            return function
    raise ValueError(
        f"{type(module).__module__} has no function {_EAGER}, by which eager attention is known over context ranks: "
        f"choose model.set_attn_implementation('sdpa')"
    )


class _OfHeads:
    """An attention module as the function sees it: with this rank's part of what it has for each head."""

    def __init__(self, module: nn.Module, heads: int, groups: int) -> None:
        self._module, self._heads = module, heads
        if hasattr(module, "num_key_value_groups"):
            self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _own_heads(found, self._heads, name) if isinstance(found, torch.Tensor) else found


def _attention(
    own_function: Callable[..., Any] | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the attention ``(B, own tokens, heads, D)`` of this rank's tokens to all; collective over the group.

    ``query`` is ``(B, heads, own tokens, D)``, ``key`` and ``value`` may have fewer heads. ``attention_mask`` is that
    of the whole sequence. Raises ``ValueError`` for arguments whose meaning for a part of a sequence is not known.
    """
    function, length = own_function or _eager(module), sequences.length
    if length is None or sequences.are_given:
        found: tuple[torch.Tensor, torch.Tensor | None] = function(module, query, key, value, attention_mask, **kwargs)
        return found
    ranks, rank = parallel_state.get_context_model_parallel_size(), parallel_state.get_context_model_parallel_rank()
    rows, heads, own, _ = query.shape
    name = type(module).__name__
    sequences.calls += 1
    if not has_values(query):
        return query.new_empty(rows, own, heads, value.shape[-1]), None
    of_keys = key.shape[1]
    if sequences.is_probed:
        return value.repeat_interleave(heads // of_keys, dim=1).transpose(1, 2).contiguous(), None
    if key.shape[2] != own:
        raise ValueError(
            f"{name} is called with {own} queries and {key.shape[2]} keys: over context ranks a layer attends to the "
            f"tokens of its own sequence. Leave caches and prefixes out."
        )
    if heads % ranks or (of_keys % ranks and ranks % of_keys):
        return _to_all_keys(function, module, query, key, value, attention_mask, length, kwargs)
    if of_keys % ranks:
        key, value = (each.repeat_interleave(ranks // of_keys, dim=1) for each in (key, value))
    kwargs.pop("position_ids", None)
    for argument, given in kwargs.items():
        if isinstance(given, torch.Tensor):
            kwargs[argument] = _own_heads(given, heads, f"{argument} of {name}")
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] == heads > 1:
        attention_mask = attention_mask.chunk(ranks, dim=1)[rank]
    query, key, value = to_heads([query, key, value], length)
    output, _ = function(
        _OfHeads(module, heads, query.shape[1] // key.shape[1]), query, key, value, attention_mask, **kwargs
    )
    return to_tokens(output.transpose(1, 2), length).transpose(1, 2).contiguous(), None


def _to_all_keys(
    function: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    length: int,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Return the attention of own queries to gathered keys and values, of heads that the ranks do not divide."""
    ranks, rank = parallel_state.get_context_model_parallel_size(), parallel_state.get_context_model_parallel_rank()
    own = own_places(length, ranks, rank, query)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
        attention_mask = attention_mask.index_select(2, own)
    elif attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} has {query.shape[1]} heads of queries and {key.shape[1]} of keys, which "
            f"context_parallel_size={ranks} does not divide, and a mask of another kind than SDPA's and eager's: give "
            f"a divisor of both, or choose model.set_attn_implementation('sdpa')"
        )
    elif getattr(module, "is_causal", True) if (given := kwargs.get("is_causal")) is None else given:
        later = torch.arange(length, device=own.device) > own.unsqueeze(1)
        empty = query.new_zeros(1, 1, *later.shape)
        attention_mask = empty.masked_fill(later, torch.finfo(query.dtype).min)
    key, value = gathered(key, 2, length), gathered(value, 2, length)
    kwargs = {name: given for name, given in kwargs.items() if name not in ("is_causal", "position_ids")}
    output, _ = function(module, query, key, value, attention_mask, **kwargs, is_causal=False)
    return output, None


def _own_heads(given: torch.Tensor, heads: int, text: str) -> torch.Tensor:
    """Return the part of ``given``, one number or one for each head, for the heads of this rank."""
    if given.numel() == 1:
        return given
    if given.shape != (heads,):
        raise ValueError(
            f"{text} is {list(given.shape)}, and over context ranks attention takes numbers of heads ({heads},) beside "
            f"queries, keys, values and a mask: train this type without context_parallelize"
        )
    ranks, rank = parallel_state.get_context_model_parallel_size(), parallel_state.get_context_model_parallel_rank()
    return given.chunk(ranks)[rank]
