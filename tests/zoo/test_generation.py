"""Verdicts of the generation sweep."""

import pytest

from tools.zoo import generation, results
from tools.zoo.results import FOLDER
from tools.zoo.sweep import APART, RIGHT


@pytest.mark.parametrize(
    ("task", "model_type", "result"),
    [("causal-lm", "qwen2_moe", "exact"), ("image-text-to-text", "instructblip", "refused")],
)
def test_a_type_has_a_verdict(task: str, model_type: str, result: str) -> None:
    assert generation.judge(task, model_type).result == result


def test_nine_tenths_of_the_types_generate_as_in_one_process() -> None:
    verdicts = results.read(FOLDER / "generation.tsv").verdicts
    assert tuple(verdicts) == generation.GENERATING
    counted = [one for types in verdicts.values() for one in types.values() if one.result not in APART]
    assert sum(one.result in RIGHT for one in counted) >= 0.9 * len(counted) > 200
    assert not [one for one in counted if one.result == "WRONG"]
