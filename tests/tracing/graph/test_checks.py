"""Assumptions of a trace: right for the inputs, or an error when the graph runs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from nxdpp.tracing.graph.calls import recorded
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


@pytest.mark.parametrize("scale", [2, 2.0, torch.ones(1)])
def test_tensors_and_numbers_are_told_apart_by_spec(scale: Any) -> None:
    module, x = Asking(nn.Linear(4, 4)), torch.randn(3, 4)
    assert torch.equal(run(module, x, scale), module(x, scale))


def test_a_tuple_that_was_taken_for_a_tensor_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"a value between layers is a tuple.*leaf_module_cls"):
        run(Asking(PairByData()), torch.randn(3, 4), 1)


def test_a_tuple_is_known_by_its_annotation() -> None:
    module, x = Asking(Pair()), torch.randn(3, 4)
    assert torch.equal(run(module, x, 1), module(x, 1))


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


@pytest.mark.parametrize("neck", [nn.Identity(), LastOfMany()], ids=["identity", "by_size"])
def test_a_module_that_gives_a_tuple_is_known_by_a_run_on_fake_tensors(neck: nn.Module) -> None:
    model = Necks(neck)
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


class EmbeddingByData(Embedding):
    """Returns a mask that depends on the data."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.linear(x), (x > 0 if bool(x.sum() > 0) else None)


class EmbeddingWithoutMask(Embedding):
    """Returns no mask, after a test of the data."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        assert not x.isnan().any()
        return self.linear(x), None


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


class Gate(nn.Module):
    """Returns a gate for long inputs only."""

    def forward(self, x: Tensor) -> Tensor | None:
        return x.sum() if len(x) > 3 else None


class ComparesWholeOutput(PlainModel):
    """Doubles its hidden states if there is a gate, without a use of the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return super().forward(x if gate is None else 2 * x)


def _trace(model: nn.Module, x: Tensor) -> TracedGraph:
    return trace_with(model, {"x": x}, options_for(model, PlainLayer))


def _run(model: nn.Module, traced: TracedGraph, x: Tensor) -> Tensor:
    result = run_graph(model, traced, {"x": x})
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("make", [lambda: ComparesWithNone(Embedding()), ComparesWholeOutput])
@pytest.mark.parametrize("rows", [3, 5])
def test_the_branch_is_that_of_the_inputs(make: Callable[[], nn.Module], rows: int) -> None:
    model, x = make(), torch.randn(rows, 4)

    traced = _trace(model, x)

    assert torch.equal(_run(model, traced, x), model(x))
    assert {(fact.read.__name__, fact.answer) for fact in traced.facts} == ({("is_none", True)} if rows == 3 else set())


def test_a_value_that_depends_on_data_is_checked_when_the_graph_runs() -> None:
    model, x = ComparesWithNone(EmbeddingByData()), torch.ones(3, 4)

    traced = _trace(model, x)

    assert traced.facts == ()
    assert torch.equal(_run(model, traced, x), model(x))
    place = r"\n  at .*test_checks\.py:\d+, in forward: hidden, mask = self\.first\(x\)\n"
    with pytest.raises(RuntimeError, match=rf"value between layers is None.*{place}.*leaf_module_cls"):
        _run(model, traced, -x)


@pytest.mark.parametrize("first", [EmbeddingWithoutMask, EmbeddingByDataOrNone])
def test_a_none_that_data_decide_is_guessed_and_checked(first: type[Embedding]) -> None:
    model, x = ComparesWithNone(first()), torch.ones(3, 4)

    traced = _trace(model, x)

    assert traced.facts == ()
    assert torch.equal(_run(model, traced, x), model(x))
    if first is EmbeddingByDataOrNone:
        place = r"\n  at .*test_checks\.py:\d+, in forward: hidden, mask = self\.first\(x\)\n"
        with pytest.raises(RuntimeError, match=rf"is a Tensor; the trace took it to be None.*{place}.*leaf_module_cls"):
            _run(model, traced, -x)


class GateByData(nn.Module):
    """Returns a value for data above 0."""

    def forward(self, x: Tensor) -> Tensor | None:
        return x.sum() if bool(x.sum() > 0) else None


def test_a_guessed_value_that_is_only_compared_is_checked() -> None:
    model, x = ComparesWholeOutput(), torch.ones(3, 4)
    model.gate = GateByData()  # type: ignore[assignment]

    traced = _trace(model, x)

    assert torch.equal(_run(model, traced, x), model(x))
    with pytest.raises(RuntimeError, match=r"a value between layers is None"):
        InProcessPipeline(model, 2, {"x": x}, options_for(model, PlainLayer)).forward({"x": -x})


class Halting(Embedding):
    """Repeats itself until the data end the loop; counts its runs."""

    runs = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        Halting.runs += 1
        steps, done = 0, torch.zeros(len(x))
        while bool((done < 1).any()):
            x, done, steps = torch.tanh(x), done + 0.4, steps + 1
        return self.linear(x), steps


class HaltingLayers(PlainModel):
    """Asks each of many modules for an item that data decide."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.halting = nn.ModuleList(Halting() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.halting:
            x, steps = module(x)
            x = x + steps
        return super().forward(x)


def test_a_loop_that_data_end_does_not_hold_up_the_trace() -> None:
    model, x = HaltingLayers(1), torch.rand(3, 4)
    assert torch.equal(_run(model, _trace(model, x), x), model(x))


def test_guesses_for_many_modules_run_each_a_few_times() -> None:
    Halting.runs = 0
    _trace(HaltingLayers(12), torch.rand(3, 4))
    assert Halting.runs <= 12 * 5


@pytest.mark.parametrize("make", [lambda: ComparesWithNone(Embedding()), ComparesWholeOutput])
def test_a_value_that_is_none_for_other_sizes_is_an_error(make: Callable[[], nn.Module]) -> None:
    model = make()
    traced = _trace(model, torch.ones(5, 4))

    with pytest.raises(RuntimeError, match=r"is None(.|\n)*  at .*test_checks\.py:\d+, in forward"):
        _run(model, traced, torch.ones(3, 4))


def test_nothing_is_asked_of_a_tensor() -> None:
    class Model(PlainModel):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            x = x if y is None else x + y
            return super().forward(x + 1 if x is not None else x)

    model = Model()
    traced = trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))

    assert traced.facts == ()
    assert torch.equal(_run(model, traced, torch.ones(3, 4)), model(torch.ones(3, 4)))


CONFIG = LlamaConfig(num_hidden_layers=1)
CONFIG._attn_implementation = "sdpa"


class Masked(nn.Module):
    """Returns what ``use`` makes of a mask of transformers."""

    def __init__(self, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor, attention_mask: Tensor) -> Any:
        mask = recorded(create_causal_mask)(CONFIG, x, attention_mask, None)
        return self.layers[0](x).sum(), self.use(mask)


def whole(mask: Any) -> Any:
    return mask


def all_items(mask: Any) -> Any:
    return mask[:, :, :] if mask is not None else None


def some_items(mask: Any) -> Any:
    return mask[:, :, -1:] if mask is not None else None


def with_another_case(mask: Any) -> Any:
    return mask[:, :] if mask is not None else torch.zeros(1)


def without_a_case(mask: Any) -> Any:
    return mask[:, :]


def results(use: Callable[[Any], Any], attention_mask: Tensor) -> tuple[Any, Any]:
    model, x = Masked(use), torch.zeros(2, 6, 8)
    specs = {"x": InputSpec(3, torch.float32), "attention_mask": InputSpec(2, torch.int64)}
    graph = trace(model, specs, {}, TracingOptions((nn.Linear,)))
    inputs = {"x": x, "attention_mask": attention_mask}
    return run_graph(model, graph, inputs)[1], model(**inputs)[1]


PADDED = torch.ones(2, 6, dtype=torch.long)
PADDED[0, 0] = 0
FULL = torch.ones_like(PADDED)


def test_a_whole_mask_may_be_none() -> None:
    ours, theirs = results(whole, PADDED)
    assert torch.equal(ours, theirs)
    assert results(whole, FULL) == (None, None)


@pytest.mark.parametrize("use", [all_items, some_items, with_another_case, without_a_case])
def test_items_of_a_mask_that_is_none_are_an_error_with_the_line(use: Callable[[Any], Any]) -> None:
    ours, theirs = results(use, PADDED)
    assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match=rf"is None(.|\n)*test_checks.py:\d+, in {use.__name__}"):
        results(use, FULL)


class _Returns(nn.Module):
    """Return the result of ``function``, without an annotation."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.function(x)


class _OnlyCompares(PlainModel):
    """Compare a module's result with ``None``, and do not use it otherwise."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.optional = _Returns(function)
        self.in_tuple = isinstance(function(torch.ones(5, 4)), tuple)

    def prepare(self, hidden: Tensor) -> Tensor:
        found = self.optional(hidden)
        if self.in_tuple:
            first, second = found
            found = None if first is None or second is None else first
        return hidden if found is None else hidden + 1


def _for_many_rows(x: Tensor) -> Tensor | None:
    return x.sum() if len(x) > 3 else None


RESULTS = {
    "never a value": lambda x: None,
    "first item is None": lambda x: (None, x),
    "second item is None": lambda x: (x, None),
    "always a value": lambda x: x,
    "a value for many rows": _for_many_rows,
    "an item for many rows": lambda x: (x, _for_many_rows(x)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_value_that_is_only_compared_takes_the_branch_of_the_model_or_is_an_error(name: str) -> None:
    model = _OnlyCompares(RESULTS[name])
    pipeline = InProcessPipeline(model, 2, {"x": torch.ones(5, 4)}, options_for(model, PlainLayer))

    for rows in (5, 3):
        x = torch.randn(rows, 4)
        if name in ("never a value", "first item is None") or ("many rows" in name and rows == 3):
            with pytest.raises(RuntimeError, match=r"a value between layers is None; .*\n  at .*test_checks\.py:\d+"):
                pipeline.train({"x": x}, 1, backward=False)
        else:
            assert torch.equal(pipeline.train({"x": x}, 1, backward=False)[0], model(x))


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


def test_annotations_that_python_cannot_evaluate_are_no_annotations() -> None:
    class Unusual(PlainLayer):
        def forward(self, x: "torch.Tensr") -> "no such name":  # type: ignore  # noqa: F722
            return super().forward(x)

    model = PlainModel()
    model.layers = nn.ModuleList(Unusual() for _ in range(2))

    assert torch.equal(
        run_graph(model, trace_with(model, {"x": X}, options_for(model, PlainLayer)), {"x": X}), model(X)
    )
