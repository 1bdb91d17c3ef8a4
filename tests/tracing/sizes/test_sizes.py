"""Questions about sizes are answered for the inputs at hand, and the graph is for inputs with the same answers."""

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.sizes.sizes import Sizes, shapes_of
from tests.support.traced_models import PlainLayer, options_for, run_graph, trace_with

WIDTH = 8


class _Asking(nn.Module):
    """Two layers, then ``ask``, which reads sizes."""

    def __init__(self, ask: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(WIDTH) for _ in range(2))
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.ask(x)


def _trace(ask: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[nn.Module, TracedGraph]:
    torch.manual_seed(0)
    model = _Asking(ask).eval()
    return model, trace_with(model, {"x": x}, options_for(model, PlainLayer))


def _window(x: torch.Tensor) -> torch.Tensor:
    return x[:, -4:].sum(1) if x.shape[1] > 4 else x.sum(1)


def _counted(x: torch.Tensor) -> torch.Tensor:
    return sum((x[:, i] * i for i in range(x.size(1))), torch.zeros(()))


def _indexed(x: torch.Tensor) -> torch.Tensor:
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    return x.sum(1) * weights[x.shape[1] - 1]


def _iterated(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.sum() for row in x])


def _with_numpy(x: torch.Tensor) -> torch.Tensor:
    return x[:, :3] if x.shape[1] % numpy.lcm(2, 3) == 0 else x[:, :1]


@pytest.mark.parametrize("ask", [_window, _counted, _indexed, _iterated, _with_numpy])
def test_the_graph_gives_the_result_of_the_model_and_tells_inputs_that_need_another_graph(
    ask: Callable[..., torch.Tensor],
) -> None:
    x = torch.randn(2, 3, WIDTH)
    model, traced = _trace(ask, x)
    assert torch.equal(run_graph(model, traced, {"x": x}), model(x))
    assert Sizes(model, shapes_of({"x": x})).hold(traced.facts)
    other = torch.randn(3, 6, WIDTH)
    assert not Sizes(model, shapes_of({"x": other})).hold(traced.facts)


def test_a_graph_serves_all_sizes_with_the_same_answer() -> None:
    model, traced = _trace(_window, torch.randn(2, 5, WIDTH))
    for length in (6, 9):
        x = torch.randn(3, length, WIDTH)
        assert Sizes(model, shapes_of({"x": x})).hold(traced.facts)
        assert torch.equal(run_graph(model, traced, {"x": x}), model(x))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[:, : int(x.max())],
    ],
    ids=["sum", "int"],
)
def test_an_answer_that_depends_on_data_is_refused(ask: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(TracingError, match=r"which only the data tells.*\n.*test_sizes.py:\d+, in "):
        _trace(ask, torch.randn(2, 5, WIDTH))


def test_the_device_of_a_value_whose_size_data_decide_is_known() -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        ends = x[x > 0]
        labels = torch.arange(x.size(0)).to(ends.device)
        return ends.sum() if labels.dtype == torch.int64 else x.sum()

    x = torch.randn(2, 3, WIDTH)
    model, traced = _trace(ask, x)

    assert torch.equal(run_graph(model, traced, {"x": x}), model(x))
