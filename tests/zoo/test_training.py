"""Verdicts of the training sweep, and its special cases."""

import pytest
import torch

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracingOptions, trace
from nxdpp.tracing.modules.layers import find_layer_classes
from nxdpp.tracing.values.in_place import assign_item
from tools.zoo import build
from tools.zoo.comparison import is_refusal
from tools.zoo.sweep import judge_quietly
from tools.zoo.training import judge


def _raised(function: object, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*arguments)  # type: ignore[operator]
    return caught.value


def test_a_trace_that_fails_is_a_refusal() -> None:
    model = build("causal-lm", "gpt2", "meta")
    error = _raised(trace, model, {}, {}, TracingOptions(find_layer_classes(model, None)))

    assert isinstance(error, TracingError)
    assert is_refusal(error)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(_raised(int, "x.py:3"), id="of another package"),
        pytest.param(_raised(find_layer_classes, None, "Layer"), id="a defect in our code"),
        pytest.param(_raised(assign_item, torch.ones(2), slice(None), torch.ones(3)), id="of torch, in our code"),
    ],
)
def test_another_error_is_not_a_refusal(error: Exception) -> None:
    assert not is_refusal(error)


@pytest.mark.parametrize(("task", "name"), [("semantic-segmentation", "mobilevit"), ("image-text-to-text", "llava")])
def test_a_type_of_each_kind_of_task_is_exact(task: str, name: str) -> None:
    assert judge_quietly(judge, task, name).result == "exact"


def test_a_difference_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.zoo.comparison.distance", lambda *given: float("inf"))
    assert judge("causal-lm", "gpt2").result == "WRONG"
