"""Program cache: one trace for each set of inputs, with the parameter owners of the first trace."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from nxdpp.agreement import step_signature
from nxdpp.pipeline.local.changes import ChangeRecord
from nxdpp.pipeline.partition.partition import make_partition
from nxdpp.pipeline.stages import program_cache as programs
from nxdpp.pipeline.stages.cut_graph import fill_output
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.tracing.graph.trace import trace
from nxdpp.tracing.modules.layers import layer_names
from nxdpp.tracing.sizes.example_inputs import example_specs
from nxdpp.tracing.sizes.sizes import shapes_of
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, make_inputs, make_model, options_for, scaled_by_modes


def _cache(
    model: nn.Module,
    layer_class: Any = None,
    stages: int = 1,
    stage: int = 0,
    spec: Any = None,
    batch: dict[str, torch.Tensor] | None = None,
) -> ProgramCache:
    options = options_for(model, layer_class)
    specs = example_specs(model, None, batch)
    first = trace(model, specs, {}, options, shapes_of(batch or {}))
    partition = make_partition(first, model, layer_names(model, options.layer_classes), stages)
    return ProgramCache(partition, options, spec, [stage], {}, ChangeRecord())


def _run(cache: ProgramCache, inputs: dict[str, Any], training: bool = False) -> Any:
    cut = cache.cut_graph(inputs, training)
    program = cache.program(cut, "output")
    values = program.stages[0].module(*(inputs[name] for name in program.stages[0].plan.inputs))
    return fill_output(cut.output, dict(zip(program.results, values, strict=True)))


def test_a_set_of_inputs_is_traced_once_and_gives_the_models_output() -> None:
    model = make_model("llama", layers=2)
    cache = _cache(model)
    inputs = make_inputs("llama")
    tokens = inputs["input_ids"]
    longer = {name: torch.cat([value, value], 1) for name, value in inputs.items()}
    sets: list[dict[str, Any]] = [
        inputs,
        {"labels": inputs["labels"], "input_ids": tokens},
        {**inputs, "attention_mask": inputs["attention_mask"].bool()},
        {"input_ids": tokens, "logits_to_keep": 3},
        {"input_ids": tokens, "attention_mask": None, "labels": None},
    ]
    with patch.object(programs, "trace", wraps=trace) as traces:
        for given in sets:
            output, expected = _run(cache, given), model(**given)
            assert torch.equal(output.logits, expected.logits)
            assert (output.loss is None) == (expected.loss is None)
            assert output.loss is None or torch.equal(output.loss, expected.loss)
        first = cache.cut_graph(inputs, False)
        assert cache.cut_graph(longer, False) is first
        assert cache.cut_graph(dict(reversed(inputs.items())), False) is first
        assert traces.call_count == len(sets)
        assert cache.cut_graph(inputs, True) is not first
    cache.forget()
    assert cache.cut_graph(inputs, False) is not first


class Scaled(PlainModel):
    """A model whose control flow depends on a number if ``decide`` is set."""

    def forward(self, x: torch.Tensor, factor: float, decide: bool = False) -> torch.Tensor:  # type: ignore[override]
        if decide and factor > 1:
            return -super().forward(x)
        return super().forward(x) * factor


def test_numbers_are_constants_only_in_control_flow_for_the_last_values() -> None:
    model = Scaled()
    x = torch.ones(3, 4)
    cache = _cache(model, PlainLayer)
    with patch.object(programs, "trace", wraps=trace) as traces:
        for factor in (2.0, 3.0, 4.5):
            assert torch.equal(_run(cache, {"x": x, "factor": factor}), model(x, factor))
        assert traces.call_count == 1
        for factor in (2.0, 0.5, 2.0):
            inputs = {"x": x, "factor": factor, "decide": True}
            assert torch.equal(_run(cache, inputs), model(**inputs))
        # One failed trace, and one for each value.
        assert traces.call_count == 4
    with patch.object(step_signature, "KEPT", 2):
        factors = (5.0, 3.0, 4.0, 4.0, 3.0)
        cuts = [weakref.ref(cache.cut_graph({"x": x, "factor": f, "decide": True}, True)) for f in factors]
    gc.collect()
    assert [cut() is not None for cut in cuts] == [False, True, True, True, True]


class _Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        return x.sum() if len(x) > 3 else None


class _Gated(PlainModel):
    """Its graph for few rows has a fact (no gate), that for many rows has none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = _Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        return super().forward(x if gate is None else x * gate)


def test_a_graph_without_facts_does_not_replace_one_whose_facts_hold() -> None:
    model = _Gated()
    cache = _cache(model, PlainLayer, batch={"x": torch.ones(3, 4)})
    with patch.object(programs, "trace", wraps=trace) as traces:
        for rows in (3, 5, 3, 2, 6, 5):
            batch = {"x": torch.randn(rows, 4)}
            assert torch.equal(_run(cache, batch), model(**batch))
        assert traces.call_count == 2


class AsksForModes(PlainModel):
    """Asks for the modes of torch around it, itself and in a module that returns ``None`` without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.optional = Optional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = scaled_by_modes(hidden)
        _, extra = self.optional(hidden)
        if extra is not None:
            hidden = hidden + extra
        result: torch.Tensor = self.head(hidden).mean()
        return result


class Optional(nn.Module):
    """A second output with gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, self.linear(x) if torch.is_grad_enabled() else None


def test_a_graph_belongs_to_the_modes_of_torch_around_it() -> None:
    model = AsksForModes()
    x = torch.ones(2, 4)
    cache = _cache(model, PlainLayer, batch={"x": x})
    with patch.object(programs, "trace", wraps=trace) as traces:
        for gradients, low in [(True, True), (False, False), (True, False)] * 2:
            with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=low):
                assert torch.equal(_run(cache, {"x": x}), model(x))
    assert traces.call_count == 3


class Weighted(PlainModel):
    """Has a number, and an object with a number, that training changes between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0
        self.unused = 0
        self.schedule = SimpleNamespace(scale=1.0)

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = hidden * self.schedule.scale + self.beta
        return changed


def test_a_number_that_changes_between_steps_is_exact() -> None:
    model = Weighted()
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    x = torch.randn(4, 4)
    graphs = set()
    for beta, scale in ((0.0, 1.0), (0.5, 1.0), (0.5, 2.0), (0.0, 1.0)):
        model.beta, model.schedule.scale = beta, scale
        model.unused += 1
        assert torch.equal(torch.stack(pipeline.train({"x": x}, 1))[0], model(x))
        graphs.add(pipeline.programs.cut_graph({"x": x}, True))
    assert len(graphs) == 3
