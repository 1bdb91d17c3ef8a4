"""Initial weights of a few types: ``python -m tools.zoo initial-values`` compares all."""

import pytest

from tools.zoo import initial_values


@pytest.mark.parametrize(
    ("task", "name", "expected"),
    [
        ("seq2seq-lm", "t5", "exact"),  # an embedding without its first name on any stage
        ("causal-lm", "reformer", "refused"),
    ],
)
def test_initial_weights_of_a_type(task: str, name: str, expected: str) -> None:
    # Three ranks have a first, a middle and a last stage.
    verdict = initial_values.judge(task, name, sizes=(3,))

    assert verdict.result == expected
    assert bool(verdict.words) == (expected != "exact")
