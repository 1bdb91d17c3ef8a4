"""Questions about devices are answered for the device of the model; fake tensors are on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.sizes import sizes
from nxdpp.tracing.values.metadata import device_of_model
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with

CUDA = torch.device("cuda", 1)


class Asks(PlainModel):
    """Doubles its hidden states where the question is answered with yes."""

    question: Callable[[torch.Tensor], bool]

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if type(self).question(hidden) else hidden


QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "is_cuda": lambda x: x.is_cuda,
    "type": lambda x: x.device.type == "cuda",
    "member": lambda x: x.device.type in ("cuda", "xpu"),
    "device": lambda x: x.device != torch.device("cpu"),
    "get_device": lambda x: x.get_device() >= 0,
}


def _doubles(model: nn.Module) -> bool:
    traced = trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
    return any(node.name.startswith("mul") for node in traced.graph.nodes)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_answered_for_the_device_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = type("AsksThis", (Asks,), {"question": staticmethod(QUESTIONS[name])})()
    assert not _doubles(model)
    # This machine may have no GPU: the model says that it is on one.
    monkeypatch.setattr(sizes, "device_of_model", lambda root: CUDA)
    assert _doubles(model)


def test_a_moved_tensor_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = type("Moves", (Asks,), {"question": staticmethod(lambda x: x.cpu().is_cuda)})()
    assert not _doubles(model)
    monkeypatch.setattr(sizes, "device_of_model", lambda root: CUDA)
    with pytest.raises(TracingError, match="the device of cpu is asked, which may be another one"):
        _doubles(model)


class Mixed(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=hidden.device.type, dtype=torch.bfloat16):
            result: torch.Tensor = self.embedding(hidden).float()
        return result


def test_autocast_of_the_device_of_a_traced_value_is_exact() -> None:
    assert_exact(Mixed(), {"x": torch.randn(4, 4)}, PlainLayer)


def test_the_device_of_a_model_is_that_of_its_first_parameter_with_values() -> None:
    model = nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(1, 1))
    assert device_of_model(model) == torch.device("cpu")
    assert device_of_model(nn.Sequential()) == torch.device("cpu")
