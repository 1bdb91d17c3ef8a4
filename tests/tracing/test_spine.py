"""The tracer of the spine: all modules beside the ancestors of layers are leaves."""

import re

import pytest
import torch
from torch import nn

from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.spine import SpineTracer
from nxdpp.tracing.swap import sources
from tests.support.traced_models import PlainLayer, PlainModel, make_model, options_for, trace_with


def test_everything_else_is_a_leaf() -> None:
    model = PlainModel()
    tracer = SpineTracer({"", "layers"}, {})

    leaves = {name for name, module in model.named_modules() if tracer.is_leaf_module(module, name)}

    assert leaves == {name for name, _ in model.named_modules()} - {"", "layers"}
    assert tracer.spine_modules(model) == [model, model.layers]


def test_the_python_modules_of_a_spine() -> None:
    model = make_model("llama", layers=2)

    found = [source.__name__ for source in sources([model, nn.ModuleList()], re.compile(r"(torch|builtins)\b"))]

    assert "transformers.models.llama.modeling_llama" in found
    assert not [name for name in found if name.startswith("torch")]


def test_the_message_names_a_value_that_a_graph_cannot_hold() -> None:
    class Handing(PlainModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(x)
            for layer in self.layers:
                hidden = layer(hidden, Handing)
            return hidden  # type: ignore[no-any-return]

    model = Handing()
    with pytest.raises(TracingError, match=r"a type is handed on between layers.*\n  at .*test_spine.py:\d+"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
