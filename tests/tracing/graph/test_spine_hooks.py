"""Hooks of modules above layers: forward hooks are traced, backward hooks are refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.in_process import InProcessPipeline
from tests.support.sized_models import train_whole
from tests.support.traced_models import PlainLayer, PlainModel


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = PlainModel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * 2
        return result


def double_arguments(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def double_keywords(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {name: value * 2 for name, value in kwargs.items()}


def triple(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 3


def observe(*_: Any) -> None:
    return None


BACKWARD: dict[str, Callable[[Any], Any]] = {
    "full": lambda module: module.register_full_backward_hook(observe),
    "before": lambda module: module.register_full_backward_pre_hook(observe),
    "old": lambda module: module.register_backward_hook(observe),
}


def assert_exact(model: nn.Module) -> None:
    whole = copy.deepcopy(model)
    batch = {"x": torch.randn(4, 4)}
    losses = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer).train(batch, 2)
    assert all(map(torch.equal, losses, train_whole(whole, batch, 2)))
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]


def test_forward_hooks_are_part_of_the_numbers() -> None:
    model: Any = Outer()
    model.register_forward_hook(triple)
    model.register_forward_pre_hook(double_keywords, with_kwargs=True)
    model.inner.register_forward_hook(triple)
    model.inner.register_forward_pre_hook(double_arguments)
    model.inner.layers[1].register_forward_hook(triple)
    assert_exact(model)


@pytest.mark.parametrize(("place", "kind"), [("", "full"), ("inner", "before"), ("inner", "old")])
def test_a_backward_hook_above_layers_is_refused(place: str, kind: str) -> None:
    model = Outer()
    BACKWARD[kind](model.get_submodule(place))
    where = place or "the model"
    with pytest.raises(ValueError, match=rf"^{where}, a \w+, has a backward hook.*Register the hook on layers or on"):
        InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)


def half_of(module: nn.Module, given: Any, wanted: Any = None) -> Any:
    return tuple(None if gradient is None else gradient / 2 for gradient in given)


def test_a_backward_hook_of_a_layer_or_beside_is_exact() -> None:
    model = Outer()
    for place in ("inner.layers.1", "inner.layers.2.linear", "inner.head"):
        model.get_submodule(place).register_full_backward_hook(half_of)
        model.get_submodule(place).register_full_backward_pre_hook(half_of)
    assert_exact(model)


def test_every_trace_refuses_a_hook_that_came_later() -> None:
    model = Outer()
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    model.inner.register_full_backward_hook(observe)
    with pytest.raises(ValueError, match="inner, a PlainModel, has a backward hook"):
        pipeline.train({"x": torch.randn(4, 4)}, 2)
