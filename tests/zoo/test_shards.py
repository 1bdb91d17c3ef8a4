"""Verdict of the shards sweep for a type whose norms compute in float32."""

import pytest

from tests.zoo.shards import judge
from tests.zoo.sweep import judge_quietly

pytestmark = pytest.mark.zoo


def test_shards_of_a_type_with_float32_in_places_equal_replicas() -> None:
    verdict = judge_quietly(judge, "causal-lm", "cpmant")

    assert verdict.result == "to rounding", verdict.words
    assert verdict.words.endswith("; float32 in places")
