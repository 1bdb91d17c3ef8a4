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
from tests.support.models import make, padded_batch, reference
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


class CallsAScript(PlainModel):
    def prepare(self, hidden: Tensor) -> Tensor:
        result: Tensor = SCRIPTED(hidden)
        return result


class CallsCompiled(PlainModel):
    def prepare(self, hidden: Tensor) -> Tensor:
        return compiled(hidden)


@functools.wraps(compiled)
def decorated(x: Tensor) -> Tensor:
    return compiled(x)


class CallsDecorated(PlainModel):
    def prepare(self, hidden: Tensor) -> Tensor:
        return decorated(hidden)


@pytest.mark.parametrize("kind", [CallsAScript, CallsCompiled, CallsDecorated])
def test_compiled_and_scripted_functions_are_single_nodes(kind: type[PlainModel]) -> None:
    assert_exact(kind(), {"x": X}, PlainLayer)


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
    whole(X).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


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


def test_checkpointed_layers_of_transformers_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = make("llama").train(), padded_batch(2)
    model.gradient_checkpointing_enable()
    whole = reference(model)
    pipeline = InProcessPipeline(model, 2)
    assert torch.equal(pipeline.train(batch, 1)[0], whole(**batch).loss)
    assert not [message for message in caplog.messages if "apply_checkpoint" in message]


class UsesAnArray(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.table: Any = numpy.full(4, 2, dtype=numpy.float32)

    def prepare(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden * self.table
        return result


class UsesABuffer(PlainModel):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.from_numpy(numpy.full(4, 2, dtype=numpy.float32)))

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden * self.table


def test_an_array_is_refused_and_a_buffer_of_it_is_exact() -> None:
    model = UsesAnArray()
    with pytest.raises(TracingError, match=r"Make it a buffer in __init__: self\.register_buffer"):
        InProcessPipeline(model, 2, {"x": X}, transformer_layer_cls=PlainLayer)
    assert_exact(UsesABuffer(), {"x": X}, PlainLayer)


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


@pytest.mark.parametrize("place", ["layers", "head"])
def test_modules_of_torchscript_are_refused_with_a_remedy(place: str) -> None:
    model: Any = PlainModel()
    plain = copy.deepcopy(model)
    if place == "layers":
        model.layers = nn.ModuleList(torch.jit.script(layer) for layer in model.layers)
    else:
        model.head = torch.jit.script(model.head)
    with pytest.raises(TypeError, match=rf"^{place}.* is a module of TorchScript.* Give the Python module"):
        PipelineConfig(model).check()
    # The remedy of the message.
    compiled_layers: Any = [torch.compile(layer, backend="eager") for layer in plain.layers]
    plain.layers = nn.ModuleList(compiled_layers)
    PipelineConfig(plain).check()
    assert_exact(PlainModel(), {"x": X}, PlainLayer)


class Penalises(PlainModel):
    """Has a penalty of the weights of all layers."""

    layers: Any

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(layer.linear.weight.abs().sum() for layer in self.layers)
        loss: Tensor = super().forward(x) + 0.01 * penalty
        return loss


def test_weights_that_two_stages_use_are_equal_to_rounding() -> None:
    model, whole = Penalises(), Penalises()
    pipeline = InProcessPipeline(model, 2, {"x": X[:2]}, transformer_layer_cls=PlainLayer)
    losses = pipeline.train({"x": X}, 2)
    for part, loss in zip(X.chunk(2), losses, strict=True):
        expected = whole(part)
        (expected / 2).backward()
        assert torch.equal(loss, expected)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-7)
