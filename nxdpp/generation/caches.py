"""Caches of keys and values of which a rank has the layers of its own stages.

A layer of another rank has an entry of one number a token in this rank's cache: ``(B, 1, T, 1)``. So the cache tells
the true length for masks and positions, and ``reorder_cache``, ``crop`` and the others run as they are.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)

from nxdpp.generation.leaves import StageLeaf

NAMES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""Names under which forwards of transformers take and return caches."""

_METHODS = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording")


def cache_among(values: Iterable[Any]) -> Cache | None:
    """Return the first cache among the arguments of a module."""
    return next((value for value in values if isinstance(value, Cache)), None)


def advance(cache: Cache, leaf: StageLeaf, hidden: torch.Tensor) -> None:
    """Enter that ``leaf``, which another rank runs, has seen ``hidden`` of (B, T, H)."""
    decoder = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    batch, length = hidden.shape[:2]
    for index in leaf.indices:
        is_growing = decoder.layer_class_to_replicate is not None
        if index >= len(decoder.layers) and not is_growing:
            continue
        layer = None if index >= len(decoder.layers) else decoder.layers[index]
        if isinstance(layer, DummyLayer):
            continue
        if layer is None or isinstance(layer, CacheLayerMixin):
            # A cache takes a tensor without elements for one of length 0.
            numbers = torch.zeros((batch, 1, length, 1), dtype=hidden.dtype, device=hidden.device)
            decoder.update(numbers, numbers, index)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state.update(dict.fromkeys(layer.has_previous_state, True))


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
