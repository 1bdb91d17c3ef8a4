"""Advice in the error of a trace: it is given where it helps, and each piece is followed here."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support import plain_functions
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with

X = torch.full((3, 4), 0.5)


def sign_of(hidden: torch.Tensor) -> torch.Tensor:
    return hidden if hidden.sum() > 0 else -hidden


def sign_by_another(hidden: torch.Tensor) -> torch.Tensor:
    """The innermost function is not the one to wrap: ``forward`` calls this one."""
    return sign_of(hidden)


class InAFunction(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return sign_by_another(hidden)


class InForward(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if hidden.sum() > 0 else -hidden


class Sign(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if hidden.sum() > 0 else -hidden


class InAModule(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.sign: nn.Module = Sign()

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.sign(hidden)
        return result


def message_of(model: nn.Module, inputs: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(TracingError) as caught:
        trace_with(model, inputs or {"x": X}, options_for(model, PlainLayer, **options))
    return str(caught.value).splitlines()[-1]


def is_right(model: nn.Module, **options: Any) -> bool:
    traced = trace_with(model, {"x": X}, options_for(model, PlainLayer, **options))
    return all(torch.equal(run_graph(model, traced, {"x": x}), model(x)) for x in (X, -X, 3 * X))


def test_a_function_is_wrapped() -> None:
    assert message_of(InAFunction()) == ("Make sign_by_another a single node: autowrap_functions=[sign_by_another].")
    assert is_right(InAFunction(), autowrap_functions=(sign_by_another,))


def test_the_functions_of_a_python_module_are_wrapped() -> None:
    class CallsAModule(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            return plain_functions.sign_of(hidden)

    name = "tests.support.plain_functions"
    assert message_of(CallsAModule()) == f"Make its functions single nodes: import {name}; autowrap_modules=[{name}]."
    assert is_right(CallsAModule(), autowrap_modules=(plain_functions,))


def test_a_line_is_moved_into_a_module_or_a_function() -> None:
    assert message_of(InForward()) == (
        "Move this line into a function that autowrap_functions names, or into a module of its own: either becomes a "
        "single node."
    )
    assert is_right(InAModule())
    assert is_right(InAFunction(), autowrap_functions=(sign_by_another,))


def test_plain_fx_has_other_remedies() -> None:
    message = message_of(InAModule(), tracer_cls="torch")
    assert message.startswith("Leave tracer_cls out, which traces through the modules above transformer layers alone;")
    assert "leaf_module_cls=[Sign]" in message
    assert is_right(InAModule())
    assert is_right(InAModule(), leaves=(Sign,), tracer_cls="torch")


class Raises(PlainModel):
    def forward(self, x: torch.Tensor, y: Any = None, **more: Any) -> torch.Tensor:
        if y is None and "z" not in more:
            raise ValueError("give y or z")
        return super().forward(x)


@pytest.mark.parametrize(("model", "inputs"), [(Raises(), {"x": X}), (PlainModel(), {"z": X})])
def test_an_error_of_the_model_itself_needs_other_inputs(model: nn.Module, inputs: dict[str, Any]) -> None:
    assert message_of(model, inputs) == (
        "The model itself raises this error for these inputs. Change those of the step, or of partition_batch."
    )


class Draws(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.randn(4)


class Noise(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.randn(4)


class DrawsInAModule(InAModule):
    def __init__(self) -> None:
        super().__init__()
        self.sign = Noise()


class DropsLayers(PlainModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            if random.random() < 0.5:
                hidden = layer(hidden)
        result: torch.Tensor = self.head(hidden).mean()
        return result


class Dropped(PlainLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if random.random() < 0.5 else x


class LayersDraw(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropped() for _ in range(4))


def test_layers_are_dropped_by_themselves() -> None:
    with pytest.raises(TracingError, match="A layer that is dropped at random draws itself, and returns its input"):
        trace_with(DropsLayers(), {"x": X}, options_for(DropsLayers(), PlainLayer))
    model = LayersDraw()
    traced = trace_with(model, {"x": X}, options_for(model, Dropped))
    for seed in range(4):
        random.seed(seed)
        expected = model(X)
        random.seed(seed)
        assert torch.equal(run_graph(model, traced, {"x": X}), expected)


def test_random_numbers_are_moved_into_a_module() -> None:
    with pytest.raises(TracingError, match="Draw in a module without layers"):
        trace_with(Draws(), {"x": X}, options_for(Draws(), PlainLayer))
    model = DrawsInAModule()
    traced = trace_with(model, {"x": X}, options_for(model, PlainLayer))
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    assert torch.equal(run_graph(model, traced, {"x": X}), expected)


class Logs(PlainModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        self.last = float(loss)
        return loss


class Computes(PlainModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss / float(loss.detach())


class KeepsTheTensor(PlainModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss / loss.detach()


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(loss))
        return loss


class LogsInAModule(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.log = Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.log(super().forward(x))
        return result


def test_a_number_of_data_is_logged_by_a_module_or_stays_a_tensor() -> None:
    for model in (Logs(), Computes()):
        with pytest.raises(
            TracingError, match=r"as a number.*returns its argument .* keep the tensor in place"
        ) as caught:
            trace_with(model, {"x": X}, options_for(model, PlainLayer))
        assert "autowrap" not in str(caught.value)
    logs = LogsInAModule()
    losses = InProcessPipeline(logs, 2, transformer_layer_cls=PlainLayer).train({"x": X[:2]}, 2)
    assert logs.log.seen == [loss.item() for loss in losses]
    assert is_right(KeepsTheTensor())
