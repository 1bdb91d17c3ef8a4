"""Caches of keys and values of which a rank has the layers of its own stages.

A layer of another rank has an entry of one number per token in this rank's cache: ``(B, 1, T, 1)``. So the cache tells
the true length for masks and positions, and ``reorder_cache``, ``crop`` and the others run as they are.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, LinearAttentionCacheLayerMixin

NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""Names under which forwards of transformers take and return caches: until 5.23 the others, from 5.24 on the first."""

_METHODS = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording")


def cache_among(values: Iterable[Any]) -> Cache | None:
    """Return the first cache among the arguments of a module."""
    return next((value for value in values if isinstance(value, Cache)), None)


class CacheUpdate(NamedTuple):
    """Change of the layer ``number`` of a cache by the call of a module.

    ``growth`` are the tokens that it adds, ``None`` for as many as the module is given. ``has_state``: the layer has a
    state without a length afterwards.
    """

    number: int
    growth: int | None
    has_state: bool


def sizes(cache: Any) -> list[tuple[int, bool]]:
    """Length of each layer of ``cache``, and whether it has a state without a length."""
    return [_size(layer) for layer in _layers(cache)]


def updates(before: Sequence[tuple[int, bool]], cache: Any, tokens: int) -> list[CacheUpdate]:
    """Return what a call that was given ``tokens`` a row has done to ``cache``, which had these sizes ``before``."""
    found = []
    for index, (length, has_state) in enumerate(sizes(cache)):
        old = before[index] if index < len(before) else (0, False)
        growth = length - old[0]
        if growth or has_state != old[1]:
            found.append(CacheUpdate(index, None if growth == tokens else growth, has_state))
    return found


def advance(cache: Any, done: Sequence[CacheUpdate], hidden: torch.Tensor) -> None:
    """Do to ``cache`` what another rank's call has done to its own; the module was given ``hidden`` (B, T, ...)."""
    decoder = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    for index, growth, has_state in done:
        length = hidden.shape[1] if growth is None else growth
        if length:
            # A cache takes a tensor without elements for one of length 0.
            numbers = torch.zeros((hidden.shape[0], 1, length, 1), device=hidden.device)
            decoder.update(numbers, numbers, index)
        if has_state:
            layer: Any = decoder.layers[index]
            flags = layer.has_previous_state
            flags.update(dict.fromkeys(flags, True))


def _layers(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache.layers if isinstance(cache, Cache) else []


def _size(layer: Any) -> tuple[int, bool]:
    length = int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0
    return length, isinstance(layer, LinearAttentionCacheLayerMixin) and all(layer.has_previous_state.values())


def record_changes(cache: Any, changes: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Append the name and the arguments of each method that changes ``cache`` to ``changes``, before it runs."""
    names = [name for name in _METHODS if hasattr(type(cache), name)]
    if not names:
        # A list of tensors, as of RWKV, changes in other ways.
        return
    # A strong reference would keep the memory of the cache until the next collection of cycles.
    there = weakref.ref(cache)

    def recorded(name: str) -> Callable[..., Any]:
        method = getattr(type(cache), name)

        def call(*args: Any) -> Any:
            changes.append((name, args))
            return method(there(), *args)

        return call

    for name in names:
        if name not in vars(cache):
            vars(cache)[name] = recorded(name)
