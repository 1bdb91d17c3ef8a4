"""Assumptions of a trace: right for the inputs, or an error when the graph runs."""

import copy
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace
from nxdpp.tracing.sizes.input_specs import InputSpec
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with

X = torch.ones(3, 4)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


class PairByData(nn.Module):
    """A pair, of which its annotation says nothing."""

    def forward(self, x: Tensor) -> Any:
        return (x, x + 1) if bool(x.sum() < 1e6) else x


class Asking(nn.Module):
    """Ask for the types of inputs and of layer outputs."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([first, nn.Linear(4, 4)])

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Any:
        hidden = self.blocks[0](x)
        if isinstance(hidden, tuple):
            hidden = hidden[1]
        if isinstance(hidden, Tensor) and torch.is_tensor(x):
            hidden = hidden * 2
        if isinstance(scale, int):
            hidden = hidden + scale
        return self.blocks[1](hidden)


def run(module: nn.Module, x: Tensor, scale: Any) -> Tensor:
    number = isinstance(scale, int | float)
    specs = {"x": InputSpec(2, torch.float32), "scale": InputSpec(None, None, type(scale))}
    if not number:
        specs["scale"] = InputSpec(scale.ndim, scale.dtype)
    graph = trace(module, specs, {}, TracingOptions((nn.Linear, Pair))).graph
    (output,) = torch.fx.GraphModule(module, graph)(x, scale)
    assert isinstance(output, Tensor)
    return output


def test_tensors_and_numbers_are_told_apart_by_spec() -> None:
    module, x = Asking(nn.Linear(4, 4)), torch.randn(3, 4)
    for scale in (2, 2.0, torch.ones(1)):
        assert torch.equal(run(module, x, scale), module(x, scale))


def test_a_tuple_that_was_taken_for_a_tensor_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"a value between layers is a tuple.*leaf_module_cls"):
        run(Asking(PairByData()), torch.randn(3, 4), 1)


class Necks(PlainModel):
    """Sums the maps that a neck gives, in one tensor or in a tuple."""

    def __init__(self, neck: nn.Module) -> None:
        super().__init__()
        self.neck = neck

    def forward(self, x: Tensor) -> Tensor:
        hidden: list[Tensor] = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        maps = self.neck(tuple(hidden[1:]))
        maps = maps if isinstance(maps, tuple | list) else [maps]
        result: Tensor = sum(self.head(one).pow(2).mean() for one in maps)
        return result


class LastOfMany(nn.Module):
    """The last map alone for long inputs, otherwise all of them; its annotation is wrong."""

    def forward(self, maps: tuple[Tensor, ...]) -> Tensor:
        return maps[-1] if len(maps[0]) > 3 else maps  # type: ignore[return-value]


def test_a_module_that_gives_a_tuple_is_known_by_a_run_on_fake_tensors() -> None:
    model = Necks(LastOfMany())
    pipeline = InProcessPipeline(model, 2)
    for rows in (2, 8):
        x = torch.randn(4 * rows, 4)
        expected = torch.stack([model(part).detach() for part in x.chunk(4)])
        found = torch.stack([loss.detach() for loss in pipeline.train({"x": x}, 4)])
        assert torch.equal(found, expected)


class Embedding(nn.Module):
    """Returns a mask for long inputs only, as HieraEmbeddings does for pretraining only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.linear(x), (x > 0 if len(x) > 3 else None)


class EmbeddingByDataOrNone(Embedding):
    """Returns no mask for data above 0."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.linear(x), (None if bool(x.sum() > 0) else x > 0)


class ComparesWithNone(PlainModel):
    """Masks its hidden states if there is a mask."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.first = embedding

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.first(x)
        if mask is not None:
            hidden = hidden * mask
        for layer in self.layers:
            hidden = layer(hidden)
        gate = None if mask is None else mask.sum()
        result: Tensor = self.head(hidden).mean() * (1 if gate is None else gate)
        return result


def _trace(model: nn.Module, x: Tensor) -> TracedGraph:
    return trace_with(model, {"x": x}, options_for(model, PlainLayer))


def _run(model: nn.Module, traced: TracedGraph, x: Tensor) -> Tensor:
    result = run_graph(model, traced, {"x": x})
    assert isinstance(result, Tensor)
    return result


def test_the_branch_is_that_of_the_inputs() -> None:
    for rows, facts in ((3, {("is_none", True)}), (5, set())):
        model, x = ComparesWithNone(Embedding()), torch.randn(rows, 4)
        traced = _trace(model, x)
        assert torch.equal(_run(model, traced, x), model(x))
        assert {(fact.read.__name__, fact.answer) for fact in traced.facts} == facts
    with pytest.raises(RuntimeError, match=r"is None(.|\n)*  at .*test_checks\.py:\d+, in forward"):
        _run(model, traced, torch.ones(3, 4))


def test_a_none_that_data_decide_is_guessed_and_checked() -> None:
    model, x = ComparesWithNone(EmbeddingByDataOrNone()), torch.ones(3, 4)

    traced = _trace(model, x)

    assert traced.facts == ()
    assert torch.equal(_run(model, traced, x), model(x))
    place = r"\n  at .*test_checks\.py:\d+, in forward: hidden, mask = self\.first\(x\)\n"
    with pytest.raises(RuntimeError, match=rf"is a Tensor; the trace took it to be None.*{place}.*leaf_module_cls"):
        _run(model, traced, -x)


class _Joint(PlainLayer):
    """A text and hidden states; the last layer returns no text, whatever its annotation says."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x + text)
        if self.is_last:
            text = None  # type: ignore[assignment]
        return text, x


class _JointModel(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Joint(index == 3) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        text = hidden = self.embedding(x)
        for layer in self.layers:
            text, hidden = layer(hidden, text)
        mean: Tensor = self.head(hidden if text is None else hidden + text).mean()
        return mean


def test_a_first_item_that_the_last_layer_sets_to_none_is_none() -> None:
    model = _JointModel()
    whole = copy.deepcopy(model)
    pipeline = InProcessPipeline(model, 2, {"x": X}, options_for(model, _Joint))

    (loss,) = pipeline.train({"x": X}, 1)
    expected = whole(X)
    expected.backward()

    assert torch.equal(loss, expected)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]
