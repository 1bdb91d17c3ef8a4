"""Modules beside the layers whose methods the spine calls, and changes that a failed trace takes back."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nxdpp.pipeline.microbatches.rows import split_inputs
from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracingOptions, trace_for
from tests.support.in_process import InProcessPipeline

INPUTS = {"x": torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.inner(x))


class Structure(nn.Module):
    """Never runs; keeps what its methods compute for other methods (Funnel)."""

    def __init__(self) -> None:
        super().__init__()
        self.seq_len: Any = None

    def start(self, x: torch.Tensor) -> Any:
        self.seq_len = x.size(1)
        self.scale = x.detach().abs().mean()
        return x * self.seq_len

    def finish(self, x: torch.Tensor) -> Any:
        return x * self.scale / self.seq_len


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.structure = Structure()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.structure.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.structure.finish(x).square().mean()


class Replacing(Model):
    """Changes itself for short inputs (BigBird)."""

    kind = "sparse"

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "sparse" and x.size(1) < 8:
            self.kind = "full"
            for layer in self.layers:
                layer.inner = nn.Linear(8, 8)
        return super().forward(x)


def test_a_module_without_a_forward_may_keep_what_its_methods_compute() -> None:
    torch.manual_seed(0)
    model = Model()
    pipeline = InProcessPipeline(model, 3, INPUTS, transformer_layer_cls=Layer)
    losses = pipeline.train(INPUTS, 2)
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert model.structure.seq_len is None

    model.zero_grad()
    for part, loss in zip(split_inputs(INPUTS, 2), losses, strict=True):
        expected = model(**part)
        (expected / 2).backward()
        assert torch.equal(loss, expected)
    assert ours
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], parameter.grad), name  # type: ignore[arg-type]


def test_a_module_that_is_replaced_in_a_layer_is_refused_and_nothing_is_changed() -> None:
    model = Replacing()
    inner = model.layers[0].inner

    with pytest.raises(TracingError, match=r"forward replaces layers\.0\.inner, a module, by another one"):
        trace_for(model, INPUTS, TracingOptions((Layer,)))

    assert model.kind == "sparse"
    assert model.layers[0].inner is inner
