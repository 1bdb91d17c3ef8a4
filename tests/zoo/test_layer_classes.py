"""Classes inside of layers as layer classes, over ranks: right numbers, or a refusal with a remedy that holds.

``python -m tools.zoo layer-classes`` takes every class of ten types.
"""

from typing import Any

import pytest
from torch import nn

from tools.zoo import build
from tools.zoo.layer_classes import classes_of, of_class, summed
from tools.zoo.sweep import Verdict

EQUAL = ("exact", "to rounding")
BY_DATA = ("equal", "refused", "refused")  # whether the mask of a batch is None
ALWAYS = ("equal", "equal", "equal")
CASES: list[tuple[str, str, str, int, tuple[str, ...]]] = [
    ("causal-lm", "llama", "Linear", 2, BY_DATA),
    ("causal-lm", "llama", "LlamaMLP", 2, ALWAYS),
    ("causal-lm", "gpt2", "Conv1D", 4, BY_DATA),
    ("masked-lm", "bert", "BertIntermediate", 4, ALWAYS),  # apply_chunking_to_forward runs it
    ("masked-lm", "bert", "LayerNorm", 2, ALWAYS),
]


def _class_of(task: str, model_type: str, name: str) -> type[nn.Module]:
    return next(cls for cls in classes_of(build(task, model_type, "meta")) if cls.__name__ == name)


@pytest.mark.parametrize(("task", "model_type", "name", "ranks", "expected"), CASES)
def test_a_class_inside_of_a_layer(
    task: str, model_type: str, name: str, ranks: int, expected: tuple[str, ...]
) -> None:
    verdict = of_class(task, model_type, _class_of(task, model_type, name), ranks)

    found = tuple("equal" if result in EQUAL else result for result in verdict.received.split(", "))
    assert found == expected, verdict
    if "refused" in expected:
        model: Any = build(task, model_type, "meta")
        (declared,) = model._no_split_modules
        assert f"transformer_layer_cls=['{declared}']" in verdict.words
        named = of_class(task, model_type, _class_of(task, model_type, declared), ranks)
        assert named.result in EQUAL


def test_a_type_has_the_verdict_of_its_worst_class() -> None:
    verdict = summed({"A": Verdict("exact"), "B": Verdict("refused", "no"), "C": Verdict("WRONG", "0.5")})

    assert verdict == Verdict("WRONG", "1 exact, 1 refused, 1 WRONG; C: 0.5", "B")
