"""Verdicts of the shards sweep: a plain type, and types that once differed or failed."""

import pytest

from tools.zoo.shards import judge
from tools.zoo.sweep import judge_quietly


# The last two have norms in float32, and code between the layers that reads the dtype of a parameter.
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["arcee", "cpmant", "openai-gpt"])
def test_sharded_replicas_equal_unsharded_ones(name: str) -> None:
    verdict = judge_quietly(judge, "causal-lm", name)

    assert verdict.result == "to rounding", verdict.words
