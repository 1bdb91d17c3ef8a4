"""Calls that no tracer goes through: compiled and scripted functions, ``vmap``, checkpoints, and arrays of NumPy."""

import copy
import functools
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nxdpp import apply_checkpoint
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for

X = torch.linspace(-1, 2, 16).view(4, 4)


def scripted(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x


SCRIPTED = torch.jit.script(scripted)


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


@functools.wraps(compiled)
def decorated(x: Tensor) -> Tensor:
    return compiled(x)


class Calls(PlainModel):
    def prepare(self, hidden: Tensor) -> Tensor:
        result: Tensor = decorated(compiled(SCRIPTED(hidden)))
        return result


def test_compiled_and_scripted_functions_are_single_nodes() -> None:
    assert_exact(Calls(), {"x": X}, PlainLayer)


class Maps(PlainModel):
    def prepare(self, hidden: Tensor) -> Tensor:
        result: Tensor = torch.vmap(lambda row: row * 2 + 1)(hidden)
        return result


def mapped(hidden: Tensor) -> Tensor:
    result: Tensor = torch.vmap(lambda row: row * 2 + 1)(hidden)
    return result


class MapsInAFunction(PlainModel):
    def prepare(self, hidden: Tensor) -> Tensor:
        return mapped(hidden)


def test_vmap_in_a_function_of_its_own_is_exact() -> None:
    model = Maps()
    with pytest.raises(TracingError, match=r"Move this line into a function that autowrap_functions names"):
        InProcessPipeline(model, 2, {"x": X}, options_for(model, PlainLayer))
    # The remedy of the message.
    other, whole = MapsInAFunction(), MapsInAFunction()
    pipeline = InProcessPipeline(other, 2, {"x": X}, options_for(other, PlainLayer, autowrap_functions=(mapped,)))
    assert torch.equal(pipeline.train({"x": X}, 1)[0], whole(X))


class Checkpoints(PlainModel):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        result: Tensor = self.head(hidden).mean()
        return result


def test_a_reentrant_checkpoint_of_layers_is_refused_with_a_remedy() -> None:
    with pytest.raises(TracingError, match=r"Call the layers plainly, and nxdpp\.apply_checkpoint") as error:
        InProcessPipeline(Checkpoints(), 2, {"x": X}, transformer_layer_cls=PlainLayer)
    assert "autowrap" not in str(error.value)
    # The remedy of the message.
    model, whole = PlainModel(), Checkpoints()
    names = [f"layers.{number}" for number in range(4)]
    wrapped = SimpleNamespace(
        rank=0, layers=names, stage_layers=names, original_module=model, local_named_modules=model.named_modules
    )
    apply_checkpoint(cast(Any, wrapped))
    pipeline = InProcessPipeline(model, 2, {"x": X}, transformer_layer_cls=PlainLayer)
    assert torch.equal(pipeline.train({"x": X}, 1)[0], whole(X))


class RecomputesLater(PlainModel):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        result: Tensor = self.head(hidden).mean()
        return result


def test_a_checkpoint_of_layers_is_exact_and_told(caplog: pytest.LogCaptureFixture) -> None:
    assert_exact(RecomputesLater(), {"x": X}, PlainLayer)
    (message,) = (record for record in caplog.messages if "checkpoint" in record)
    assert "test_compiled_calls.py" in message
    assert "nxdpp.apply_checkpoint(model) once after wrapping" in message


class ListOfNumbers(PlainLayer):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0, 2.0]
        self.table: Any = numpy.ones(2)

    def project(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class ReadsLayers(PlainModel):
    layers: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ListOfNumbers() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(layer.project(hidden)) * layer.scales[1] * float(layer.table.sum())
        result: Tensor = self.head(hidden).mean()
        return result


def test_methods_lists_and_arrays_of_layers_are_exact() -> None:
    assert_exact(ReadsLayers(), {"x": X}, ListOfNumbers)


def test_modules_of_torchscript_are_refused_with_a_remedy() -> None:
    model: Any = PlainModel()
    plain = copy.deepcopy(model)
    model.layers = nn.ModuleList(torch.jit.script(layer) for layer in model.layers)
    with pytest.raises(TypeError, match=r"^layers.* is a module of TorchScript.* Give the Python module"):
        PipelineConfig(model).check()
    # The remedy of the message.
    compiled_layers: Any = [torch.compile(layer, backend="eager") for layer in plain.layers]
    plain.layers = nn.ModuleList(compiled_layers)
    PipelineConfig(plain).check()
