"""Caches of keys and values of which a rank has the layers of its own stages.

A layer of another rank has an entry of one number a token in this rank's cache: ``(B, 1, T, 1)``. So the cache tells
the true length for masks and positions, and ``reorder_cache``, ``crop`` and the others run as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)

NAMES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""Names under which forwards of transformers take and return caches."""

_METHODS = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording")


def cache_among(values: Iterable[Any]) -> Cache | None:
    """Return the first cache among the arguments of a module."""
    return next((value for value in values if isinstance(value, Cache)), None)


def lengths(cache: Any) -> list[int]:
    """The length of each layer of ``cache`` before a forward."""
    return [_length(layer) for layer in _layers(cache)]


def advance(cache: Any, before: Sequence[int], tokens: torch.Tensor) -> None:
    """Enter into ``cache``, after a forward of ``tokens`` (B, T, ...), that other ranks have run their layers.

    ``before`` are the lengths before the forward. Layers that have the same now are taken for those of other ranks.
    """
    layers = _layers(cache)
    known = [*before, *[0] * (len(layers) - len(before))]
    grown = [layer for layer, length in zip(layers, known, strict=True) if _length(layer) != length]
    batch, length = tokens.shape[:2]
    if grown:
        batch = grown[0].keys.shape[0]
        length = max(_length(layer) - old for layer, old in zip(layers, known, strict=True))
    # A cache takes a tensor without elements for one of length 0.
    numbers = torch.zeros((batch, 1, length, 1), device=tokens.device)
    for layer in layers:
        if isinstance(layer, CacheLayerMixin) and layer not in grown:
            layer.update(numbers, numbers)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state.update(dict.fromkeys(layer.has_previous_state, True))


def _layers(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache.layers if isinstance(cache, Cache) else []


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0


def record_changes(cache: Any, record: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call ``record`` with the name and the arguments of each method that changes ``cache``, before it runs."""

    def recorded(name: str) -> Callable[..., Any]:
        method = getattr(cache, name)

        def call(*args: Any) -> Any:
            record(name, args)
            return method(*args)

        return call

    for name in _METHODS:
        if hasattr(cache, name) and name not in vars(cache):
            vars(cache)[name] = recorded(name)
