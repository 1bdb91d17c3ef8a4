"""The zoo tells a refusal from a mishap, and does without nothing that a user could not give."""

import pytest

from nxdpp.pipeline.partition.cuts import even_cuts
from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.layers import find_layer_classes
from nxdpp.tracing.trace import TracingOptions, trace
from tests.zoo import ARGUMENTS, CANNOT_TRAIN, NOTES, TASKS, build, types
from tests.zoo.training import is_refusal, judge


def _raised(function: object, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*arguments)  # type: ignore[operator]
    return caught.value


def test_a_sentence_of_ours_with_a_place_is_a_refusal() -> None:
    model = build("causal-lm", "gpt2", "meta")
    error = _raised(trace, model, {}, {}, TracingOptions(find_layer_classes(model, None)))

    assert isinstance(error, TracingError)
    assert is_refusal(error)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(_raised(even_cuts, ["a"], 2), id="ours, without a place"),
        pytest.param(_raised(int, "x.py:3"), id="another's"),
        pytest.param(_raised(find_layer_classes, None, "Layer"), id="a mishap in our code"),
    ],
)
def test_anything_else_is_none(error: Exception) -> None:
    assert not is_refusal(error)


def test_a_type_that_is_right_says_what_it_needs() -> None:
    kind, crossing, words = judge("masked-lm", "albert")

    assert (kind, crossing) == ("exact", "1 1 1")
    assert words == "num_hidden_groups=4, a group for each layer; transformer_layer_cls=['AlbertLayerGroup']"


def test_a_pipeline_that_is_wrong_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.zoo.training.distance", lambda *given: 0.5)
    assert judge("causal-lm", "gpt2").kind == "WRONG"

    monkeypatch.setattr("tests.zoo.training.distance", lambda *given: float("inf"))
    assert judge("causal-lm", "gpt2").kind == "WRONG"


def test_special_cases_are_of_types_that_there_are() -> None:
    known = {name for task in TASKS for name in types(task)}

    assert set(ARGUMENTS) | set(NOTES) | {name for _, name in CANNOT_TRAIN} <= known
