"""Verdicts of the shards sweep for types that once differed or failed."""

import pytest

from tests.zoo.shards import judge
from tests.zoo.sweep import judge_quietly

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize(
    "name",
    [
        "cpmant",  # norms in float32
        # Code between its layers reads the dtype of a parameter.
        pytest.param("openai-gpt", marks=pytest.mark.sweep),
    ],
)
def test_sharded_replicas_equal_unsharded_ones(name: str) -> None:
    verdict = judge_quietly(judge, "causal-lm", name)

    assert verdict.result == "to rounding", verdict.words
