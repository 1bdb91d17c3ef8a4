"""Changes that layers make to objects that the spine can reach are refused in the first run of a stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline

LOSSES: list[Tensor] = []
LOGGED: list[float] = []
REGISTRY: dict[type, Any] = {}


@pytest.fixture(autouse=True)
def _empty() -> None:
    LOSSES.clear()


class Layer(nn.Module):
    """Tells its loss to ``tell``, beside its output."""

    def __init__(self, tell: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tell = tell

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        y = self.linear(x)
        self.tell(self, y.square().mean(), *given)
        return torch.tanh(y)


class Model(nn.Module):
    """Gives its layers ``given``, and adds the losses that ``read`` finds afterwards."""

    def __init__(
        self,
        tell: Callable[..., Any],
        read: Callable[[Any], Any],
        given: Callable[[], tuple[Any, ...]] = tuple,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(tell) for _ in range(4))
        self.read = read
        self.given = given
        self.features: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        given = self.given()
        for layer in self.layers:
            x = layer(x, *given)
        return x.square().mean() + self.read(self)


def to_a_global(layer: Any, loss: Tensor) -> None:
    LOSSES.append(loss)


def to_nothing(layer: Any, loss: Tensor, *given: Any) -> None:
    pass


def to_its_list(layer: Any, loss: Tensor) -> None:
    layer.losses.append(loss)


def fills_the_first(layer: Any, loss: Tensor, given: Any) -> None:
    given["loss"] = given.get("loss", 0.0) + loss


def with_hooks() -> Model:
    """Hooks fill a list of the model."""
    model = Model(to_nothing, lambda model: sum(feature.mean() for feature in model.features))
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: model.features.append(output))
    return model


def with_lists() -> Model:
    """Each layer fills a list of its own."""
    model = Model(to_its_list, lambda model: sum(sum(layer.losses) for layer in model.layers))
    for layer in model.layers:
        vars(layer).update(losses=[])
    return model


CHANGES: dict[str, tuple[Callable[[], Model], str]] = {
    "a global list": (lambda: Model(to_a_global, lambda model: sum(LOSSES)), r"test_first_run\.LOSSES"),
    "a list of the model": (with_hooks, r"Model\.features"),
    "a list of a layer": (with_lists, r"Model\.layers\.0\.losses"),
    "an argument": (lambda: Model(fills_the_first, lambda model: 0.0, lambda: ({"a": 1},)), "its argument 1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_object_that_the_spine_reads_is_refused(change: str) -> None:
    make, place = CHANGES[change]
    model = make()
    pipeline = InProcessPipeline(model, 2, {"x": torch.randn(2, 4)}, transformer_layer_cls=Layer)
    with pytest.raises(RuntimeError, match=rf"(?s)layers\.0 \(Layer\) changes .*{place}.*Return "):
        pipeline.train({"x": torch.randn(4, 4)}, 2)
    assert all(parameter.grad is None for parameter in model.parameters())


def counts_for_itself(layer: Any, loss: Tensor, *given: Any) -> None:
    layer.runs = getattr(layer, "runs", 0) + 1
    layer.cache = {"loss": loss}
    LOGGED.append(float(loss))
    REGISTRY.setdefault(type(loss), [])


def test_a_change_that_the_spine_does_not_read_is_not_refused() -> None:
    LOGGED.clear()
    model = Model(
        counts_for_itself, lambda model: len([*map(type, REGISTRY.values())]) * 0.0, lambda: ({"a": 1}, [2.0], (3, 4))
    )
    assert_exact(model, {"x": torch.randn(4, 4)}, Layer)
    assert LOGGED


class Marking(Layer):
    """Returns a tensor with an attribute, which the next layer reads."""

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        y = torch.tanh(self.linear(x)) + getattr(x, "extra", 0.0)
        setattr(y, "extra", y.detach().mean())  # noqa: B010
        return y


def test_an_attribute_of_an_output_is_refused() -> None:
    model = Model(to_nothing, lambda model: 0.0)
    model.layers = nn.ModuleList(Marking(to_nothing) for _ in range(4))
    pipeline = InProcessPipeline(model, 2, {"x": torch.randn(2, 4)}, transformer_layer_cls=Marking)
    with pytest.raises(RuntimeError, match=r"layers\.0 \(Marking\) returns .* the attribute extra.*return y, v"):
        pipeline.train({"x": torch.randn(4, 4)}, 2)


class SettingLayer(Layer):
    """Sets its loss as its attribute."""

    loss: Any = 0.0

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        y = self.linear(x)
        self.loss = y.square().mean()
        return torch.tanh(y)


def test_the_remedy_is_exact() -> None:
    setting = Model(to_nothing, lambda model: sum(layer.loss for layer in model.layers))
    setting.layers = nn.ModuleList(SettingLayer(to_nothing) for _ in range(4))
    assert_exact(setting, {"x": torch.randn(4, 4)}, SettingLayer)
