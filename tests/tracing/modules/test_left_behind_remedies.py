"""Refusals of attributes on layers end with a remedy that helps with them, and each remedy is followed here."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.tracing.modules.test_left_behind import WIDTH, Layer, Model, Nested

X = {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))}
GENERAL = ("autowrap", "leaf_module_cls", "tracer_cls", "module of its own")


def refused(model: nn.Module, remedy: str, layer: str) -> None:
    with pytest.raises(TracingError) as caught:
        InProcessPipeline(model, 2, transformer_layer_cls=layer)
    assert remedy in str(caught.value)
    assert not [advice for advice in GENERAL if advice in str(caught.value)]


class Early(Model):
    def begin(self, x: Tensor) -> None:
        self.layers[1].aux + 1


class Masked(Layer):
    mask: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.mask if mask is None else mask
        return super().forward(x if mask is None else x * mask)


class StoringMask(Model):
    def begin(self, x: Tensor) -> None:
        for layer in self.layers:
            layer.mask = x > 0


class PassingMask(Model):
    def forward(self, x: Tensor) -> Any:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h, x > 0)
        return self.head(h).pow(2).mean()


class Shared(Model):
    def __init__(self) -> None:
        super().__init__(Nested)
        for layer in self.layers[1:]:
            layer.moe.gate = self.layers[0].moe.gate

    def auxiliary(self) -> Any:
        return self.layers[0].moe.gate.by_name


class ReturningGate(nn.Module):
    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return y.softmax(-1), y.softmax(-1).pow(2).sum(-1).mean()


class Returning(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate: Any = ReturningGate()

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        weights, loss = self.gate(y)
        return x + weights * y, loss


class SharedAndReturned(Model):
    def __init__(self) -> None:
        super().__init__(Returning)
        for layer in self.layers[1:]:
            layer.gate = self.layers[0].gate

    def forward(self, x: Tensor) -> Any:
        x, total = self.embedding(x), 0
        for layer in self.layers:
            x, aux = layer(x)
            total = total + aux
        return self.head(x).pow(2).mean() + total


CASES: dict[str, tuple[Any, str, Any, str]] = {
    "a read before the run": (Early, "Read it after the run.", None, "Layer"),
    "a tensor": (
        lambda: StoringMask(Masked), "Pass it as an argument of that module", lambda: PassingMask(Masked), "Masked"
    ),
    "a shared module": (Shared, "Return the value from forward.", SharedAndReturned, "Nested"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_has_its_own_remedy(case: str) -> None:
    model, remedy, remedied, layer = CASES[case]
    refused(model(), remedy, layer)
    if remedied is not None:
        assert_exact(remedied(), X, "Returning" if remedied is SharedAndReturned else layer)


class Sometimes(Layer):
    """Leave a tensor behind for some data only."""

    def __init__(self) -> None:
        super().__init__()
        del self.aux

    def leave(self, y: Tensor) -> None:
        if y.sum() > 1e6:
            self.aux = y.pow(2).mean()


class Always(Layer):
    def leave(self, y: Tensor) -> None:
        self.aux = y.pow(2).mean() if y.sum() > 1e6 else y.sum() * 0


def test_an_attribute_that_a_run_does_not_set() -> None:
    pipeline = InProcessPipeline(Model(Sometimes), 2, transformer_layer_cls="Sometimes")
    with pytest.raises(RuntimeError, match=r"has not set aux.* Set it in __init__ too, and in every run of forward\."):
        pipeline.train(X, 2)
    assert_exact(Model(Always), X, "Always")
