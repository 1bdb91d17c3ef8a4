"""Verdicts of the generation sweep."""

import pytest

from tests.zoo import generation, results
from tests.zoo.results import FOLDER
from tests.zoo.sweep import APART, RIGHT

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize(("model_type", "result"), [("qwen2_moe", "exact"), ("rwkv", "refused")])
def test_a_type_has_a_verdict(model_type: str, result: str) -> None:
    assert generation.judge("causal-lm", model_type).result == result


def test_nine_tenths_of_the_types_generate_as_in_one_process() -> None:
    verdicts = results.read(FOLDER / "generation.tsv").verdicts["causal-lm"].values()
    counted = [one for one in verdicts if one.result not in APART]
    assert sum(one.result in RIGHT for one in counted) >= 0.9 * len(counted) > 100
    assert not [one for one in counted if one.result == "WRONG"]
