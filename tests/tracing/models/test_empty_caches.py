"""Caches that code outside the layers makes although ``use_cache`` is off."""

from tools.zoo.sweep import judge_quietly
from tools.zoo.training import judge


def test_a_model_that_makes_a_cache_by_itself_is_exact() -> None:
    assert judge_quietly(judge, "sequence-classification", "xlm").result == "exact"
