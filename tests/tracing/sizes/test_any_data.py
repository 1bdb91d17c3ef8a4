"""Questions about sizes behind modules that ask data are answered if both answers to the data give the same sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.sizes.sizes import Sizes, shapes_of
from tests.support.traced_models import PlainLayer, options_for, run_graph, trace_with

WIDTH = 8


class _Maps(nn.Module):
    """``maps`` of its input, which may ask data."""

    def __init__(self, maps: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.maps = maps

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.maps(self.linear(x))


class _Model(nn.Module):
    def __init__(self, maps: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(WIDTH) for _ in range(2))
        self.neck = _Maps(maps)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        maps = self.neck(x)
        return torch.stack([one.sum(1) / one.shape[1] for one in maps if one.shape[1] > 2]).sum(0)


def _clamped(x: Tensor) -> list[Tensor]:
    if not torch.isfinite(x).all():
        x = x.clamp(-1, 1)
    return [x, x[:, 1:], x[:, 2:]]


def _as_many_as_data_tell(x: Tensor) -> list[Tensor]:
    return [x] * (2 if bool(x.sum() > 0) else 3)


def _seldom_fewer(x: Tensor) -> list[Tensor]:
    return [x, x] if int(x.argmax()) > 1 else [x, x, x]


def _cropped_by_data(x: Tensor) -> list[Tensor]:
    return [x if bool(x.sum() > 0) else x[:, :3]]


def _trace(maps: Callable[[Tensor], list[Tensor]], x: Tensor) -> tuple[nn.Module, TracedGraph]:
    torch.manual_seed(0)
    model = _Model(maps).eval()
    return model, trace_with(model, {"x": x}, options_for(model, PlainLayer))


def test_a_graph_serves_inputs_with_the_same_answers_alone() -> None:
    model, traced = _trace(_clamped, torch.randn(2, 6, WIDTH))

    other = torch.randn(3, 9, WIDTH)
    assert Sizes(model, shapes_of({"x": other})).hold(traced.facts)
    assert torch.equal(run_graph(model, traced, {"x": other}), model(other))
    assert not Sizes(model, shapes_of({"x": torch.randn(2, 4, WIDTH)})).hold(traced.facts)


@pytest.mark.parametrize("maps", [_as_many_as_data_tell, _cropped_by_data])
def test_sizes_that_data_change_are_refused(maps: Callable[[Tensor], list[Tensor]]) -> None:
    with pytest.raises(TracingError):
        _trace(maps, torch.randn(2, 6, WIDTH))


def test_an_answer_that_data_change_after_all_is_an_error() -> None:
    x = torch.randn(2, 6, WIDTH)
    model, traced = _trace(_seldom_fewer, x)

    with pytest.raises(RuntimeError, match="data decide about a size between layers: the answer to number_of_items"):
        run_graph(model, traced, {"x": x})
