"""The text of a graph: equal on all ranks with the same graph, different for any other graph."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from nxdpp.agreement.fingerprint import canonical, fingerprint, graph_lines, parameter_lines
from tests.support.traced_models import PlainLayer, PlainModel, make_inputs, make_model, options_for, trace_with


def added(amount: int) -> Any:
    return lambda x: x + amount


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b", "a"}, "{'a', 'b'}"),
        ({"b": 1, "a": {"d": 2, "c": 3}}, "{'a': {'c': 3, 'd': 2}, 'b': 1}"),
        (torch.zeros(2, 3), "tensor [2, 3] torch.float32"),
        (torch.nn.functional.relu, "torch.nn.functional.relu<>"),
        (partial(added, 2), "partial([tests.agreement.test_fingerprint.added<>, [2], {}])"),
        (added(3), "tests.agreement.test_fingerprint.added.<locals>.<lambda><3>"),
        (object(), "builtins.object"),
    ],
)
def test_texts_of_values_have_no_addresses(value: Any, text: str) -> None:
    assert canonical(value) == text


def test_the_text_of_a_configuration_has_its_values_and_not_its_path() -> None:
    here, there = LlamaConfig(), LlamaConfig()
    there.name_or_path = "/there"
    assert canonical(here) == canonical(there)
    assert canonical(here) != canonical(LlamaConfig(rms_norm_eps=1e-3))


@pytest.mark.parametrize("architecture", ["llama"])
def test_the_same_model_gives_the_same_text(architecture: str) -> None:
    models = [make_model(architecture, layers=2) for _ in range(2)]
    traced = [trace_with(model, make_inputs(architecture)) for model in models]
    graphs = [graph_lines(t, {}, model) for t, model in zip(traced, models, strict=True)]
    first, second = (g + parameter_lines(m.named_parameters()) for g, m in zip(graphs, models, strict=True))
    assert first == second
    assert fingerprint(first) == fingerprint(second)
    assert " at 0x" not in "".join(first)
    assert fingerprint(first).lines == first


def test_the_modes_of_a_node_are_part_of_its_line() -> None:
    class Blocks(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return torch.sin(hidden)

    model = Blocks()
    lines = graph_lines(trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer)), {}, model)
    (line,) = (line for line in lines if "sin" in line.partition(" = ")[0])
    assert line.endswith("(model_embedding) under [['gradients', False]] in block 0")
