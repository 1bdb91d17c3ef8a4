"""Caches that code outside the layers makes although ``use_cache`` is off."""

from typing import Any

from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from nxdpp.tracing.models.caches import without_empty_caches
from tools.zoo.sweep import judge_quietly
from tools.zoo.training import judge


class Attention(nn.Module):
    def forward(self, x: Any, cache: Any = None) -> Any:
        return x if cache is None else cache.update(x, x, 0)[0]


def test_a_layer_gets_none_for_an_empty_cache() -> None:
    empty = EncoderDecoderCache(DynamicCache(), DynamicCache())

    assert without_empty_caches(Attention(), (1,), {"cache": empty}) == ((1, None), {})
    assert without_empty_caches(Attention(), (1, DynamicCache()), {}) == ((1, None), {})


def test_a_model_that_makes_a_cache_by_itself_is_exact() -> None:
    assert judge_quietly(judge, "sequence-classification", "xlm").result == "exact"
