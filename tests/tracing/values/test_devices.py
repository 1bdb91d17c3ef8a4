"""Questions about devices are answered for the device of the model; fake tensors are on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.values import metadata
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with

CUDA = torch.device("cuda", 1)


class Asks(PlainModel):
    """Doubles its hidden states for each question that is answered with yes."""

    def __init__(self, questions: list[Callable[[torch.Tensor], bool]]) -> None:
        super().__init__()
        self.questions = questions

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        for question in self.questions:
            hidden = hidden * 2 if question(hidden) else hidden
        return hidden


QUESTIONS: list[Callable[[torch.Tensor], bool]] = [
    lambda x: x.is_cuda,
    lambda x: x.device.type == "cuda",
    lambda x: x.device.type in ("cuda", "xpu"),
    lambda x: x.device != torch.device("cpu"),
    lambda x: x.get_device() >= 0,
]


def _doublings(model: nn.Module) -> int:
    traced = trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
    return sum(node.name.startswith("mul") for node in traced.graph.nodes)


def test_a_question_is_answered_for_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Asks(QUESTIONS)
    assert _doublings(model) == 0
    # This machine may have no GPU: the model says that it is on one.
    monkeypatch.setattr(metadata, "device_of_model", lambda root: CUDA)
    assert _doublings(model) == len(QUESTIONS)


def test_a_moved_tensor_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Asks([lambda x: x.cpu().is_cuda])
    assert _doublings(model) == 0
    monkeypatch.setattr(metadata, "device_of_model", lambda root: CUDA)
    with pytest.raises(TracingError, match="the device of cpu is asked, which may be another one"):
        _doublings(model)


class Mixed(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=hidden.device.type, dtype=torch.bfloat16):
            result: torch.Tensor = self.embedding(hidden).float()
        return result


def test_autocast_of_the_device_of_a_traced_value_is_exact() -> None:
    assert_exact(Mixed(), {"x": torch.randn(4, 4)}, PlainLayer)
