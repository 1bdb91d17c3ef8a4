"""Verdicts of the training sweep, and its special cases."""

import pytest

from nxdpp.pipeline.partition.cuts import even_cuts
from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.layers import find_layer_classes
from nxdpp.tracing.trace import TracingOptions, trace
from tests.zoo import ARGUMENTS, CANNOT_TRAIN, NOTES, TASKS, build, types
from tests.zoo.sweep import judge_quietly
from tests.zoo.training import is_refusal, judge

pytestmark = pytest.mark.zoo


def _raised(function: object, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*arguments)  # type: ignore[operator]
    return caught.value


def test_our_error_with_file_and_line_is_a_refusal() -> None:
    model = build("causal-lm", "gpt2", "meta")
    error = _raised(trace, model, {}, {}, TracingOptions(find_layer_classes(model, None)))

    assert isinstance(error, TracingError)
    assert is_refusal(error)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(_raised(even_cuts, ["a"], 2), id="ours, without a place"),
        pytest.param(_raised(int, "x.py:3"), id="of another package"),
        pytest.param(_raised(find_layer_classes, None, "Layer"), id="a defect in our code"),
    ],
)
def test_another_error_is_not_a_refusal(error: Exception) -> None:
    assert not is_refusal(error)


def test_a_right_type_has_the_arguments_that_it_needs() -> None:
    verdict = judge_quietly(judge, "masked-lm", "albert")

    assert (verdict.result, verdict.received) == ("exact", "1 1 1")
    assert verdict.words == "num_hidden_groups=4, a group for each layer; transformer_layer_cls=['AlbertLayerGroup']"


def test_a_difference_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.zoo.training.distance", lambda *given: 0.5)
    assert judge("causal-lm", "gpt2").result == "WRONG"

    monkeypatch.setattr("tests.zoo.training.distance", lambda *given: float("inf"))
    assert judge("causal-lm", "gpt2").result == "WRONG"


def test_special_cases_are_of_existing_types() -> None:
    known = {name for task in TASKS for name in types(task)}

    assert set(ARGUMENTS) | set(NOTES) | {name for _, name in CANNOT_TRAIN} <= known
