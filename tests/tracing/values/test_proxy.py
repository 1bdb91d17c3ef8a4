"""In-place changes keep their order; the spec of an input is known while tracing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import trace
from nxdpp.tracing.sizes.input_specs import InputSpec
from nxdpp.tracing.values.in_place import assign_item
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, PreparedModel, options_for, run_graph, trace_with


def _assigns(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 1
    hidden[:, 0] = 7.0
    hidden[0] = hidden[1] * 2
    return hidden


def _masks(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 1
    hidden.masked_fill_(hidden > 0, -3.0)
    return hidden


def _reads_between(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 1
    before = hidden.sum()
    hidden.mul_(2).add_(1)
    hidden[0] += before
    return hidden + hidden.sum()


def _returns_itself(hidden: torch.Tensor) -> torch.Tensor:
    changed = (hidden * 1).clamp_(min=0)
    other = changed.add_(1)
    return changed + other


@pytest.mark.parametrize("function", [_assigns, _masks, _reads_between, _returns_itself])
def test_changes_in_place_are_made_in_their_order(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = PreparedModel(function)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))

    traced = trace_with(model, {"x": x}, options_for(model, PlainLayer))
    result = run_graph(model, traced, {"x": x})

    expected = model(x)
    assert torch.equal(result, expected)
    result.backward()
    gradient = model.embedding.weight.grad
    model.zero_grad()
    expected.backward()
    assert gradient is not None
    assert model.embedding.weight.grad is not None
    assert torch.equal(gradient, model.embedding.weight.grad)


class Marks(PlainModel):
    """Sets an attribute of the hidden state. ``gives``: the layers get the marked tensor."""

    def __init__(self, gives: bool) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: torch.Tensor) -> Any:
        hidden: Any = self.embedding(x)
        hidden.scale = 0.9
        for layer in self.layers:
            hidden = layer(hidden if self.gives else hidden * hidden.scale)
            hidden.scale = 0.8
        return self.head(hidden).mean()


def test_an_attribute_set_on_a_tensor_for_a_layer_is_refused() -> None:
    model = Marks(True)
    with pytest.raises(TracingError, match=r"sets \w+\.scale, and gives .* Give scale to PlainLayer as an argument"):
        trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))


def test_an_attribute_that_the_spine_alone_reads_is_exact() -> None:
    assert_exact(Marks(False), {"x": torch.ones(4, 4)}, PlainLayer)


def test_assign_item_gives_the_value_it_changed() -> None:
    value = torch.zeros(3)

    assert assign_item(value, 1, 5.0) is value
    assert value.tolist() == [0, 5, 0]


class AsksForFacts(PlainModel):
    """Decide by the spec of an input."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        if mask is not None and mask.dtype == torch.bool:
            x = x.masked_fill(mask, 0.0)
        elif mask is not None and mask.ndim == 1:
            x = x * mask
        elif mask is not None and len(mask.shape) == 2 and len(mask.size()) == 2:
            x = x + mask
        rows, columns = x.shape
        return super().forward(x) * rows * columns


@pytest.mark.parametrize("mask", [None, torch.eye(3, 4).bool(), torch.arange(4.0), torch.eye(3, 4)])
def test_dimensions_and_dtype_of_an_input_decide(mask: torch.Tensor | None) -> None:
    model = AsksForFacts()
    inputs = {"x": torch.ones(3, 4), "mask": mask}

    traced = trace_with(model, inputs, options_for(model, PlainLayer))

    assert torch.equal(run_graph(model, traced, inputs), model(**inputs))


def test_a_number_is_traced_without_its_value() -> None:
    class Scales(PlainModel):
        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * factor

    model = Scales()
    x = torch.ones(3, 4)

    specs = {"x": InputSpec(2, torch.float32), "factor": InputSpec(None, None)}
    traced = trace(model, specs, {}, options_for(model, PlainLayer))

    for factor in (2, 0.5):
        assert torch.equal(run_graph(model, traced, {"x": x, "factor": factor}), model(x, factor))
