"""A class inside of layers as layer class, over ranks: right numbers, or a refusal with a remedy that holds.

``python -m tools.zoo layer-classes`` takes every class of ten types.
"""

from typing import Any

from torch import nn

from tools.zoo import build
from tools.zoo.layer_classes import classes_of, of_class

EQUAL = ("exact", "to rounding")
BY_DATA = ("equal", "refused", "refused")  # whether the mask of a batch is None


def _class_of(task: str, model_type: str, name: str) -> type[nn.Module]:
    return next(cls for cls in classes_of(build(task, model_type, "meta")) if cls.__name__ == name)


def test_a_class_inside_of_a_layer() -> None:
    task, model_type, ranks = "causal-lm", "llama", 2
    verdict = of_class(task, model_type, _class_of(task, model_type, "Linear"), ranks)

    found = tuple("equal" if result in EQUAL else result for result in verdict.received.split(", "))
    assert found == BY_DATA, verdict
    model: Any = build(task, model_type, "meta")
    (declared,) = model._no_split_modules
    assert f"transformer_layer_cls=['{declared}']" in verdict.words
    named = of_class(task, model_type, _class_of(task, model_type, declared), ranks)
    assert named.result in EQUAL
