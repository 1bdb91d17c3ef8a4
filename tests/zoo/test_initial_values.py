"""First values of a few types, each of another kind: the command compares all."""

import pytest

from tests.zoo import initial_values


@pytest.mark.parametrize(
    ("task", "name", "kind"),
    [
        ("causal-lm", "gpt2", "exact"),  # projections of all layers are drawn by the whole model
        ("causal-lm", "mamba", "exact"),  # computed parameters
        ("seq2seq-lm", "t5", "exact"),  # an embedding that no stage has under its first name
        ("masked-lm", "xlm-roberta", "exact"),  # a head that comes before the embedding it shares
        ("causal-lm", "openai-gpt", "left"),
        ("causal-lm", "xlm", "refused"),
    ],
)
def test_a_type(task: str, name: str, kind: str) -> None:
    found, words = initial_values.judge(task, name)

    assert found == kind
    assert bool(words) == (kind != "exact")
