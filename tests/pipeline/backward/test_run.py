"""Received tensors in the autograd graph; ``run_backward`` as ``torch.autograd.backward`` and ``grad``."""

import copy
import importlib.util
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from nxdpp.devices.kinds import has_own_memory
from nxdpp.pipeline.backward.graph import BackwardAnalysis
from nxdpp.pipeline.backward.run import ReceivedTensor, edge_of, run_backward
from nxdpp.pipeline.backward.split import SplitBackward
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel


def test_an_import_within_inference_mode_serves_training() -> None:
    spec = importlib.util.find_spec("nxdpp.pipeline.backward.run")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with torch.inference_mode():
        spec.loader.exec_module(module)
    assert not module._ANCHOR.is_inference()
    received = module.ReceivedTensor(torch.ones(2))
    module.run_backward([received.enter_graph() * 2], [torch.ones(2)])
    assert received.gradient.tolist() == [2, 2]


def test_an_edge_is_that_of_torch_and_keeps_a_node_of_python() -> None:
    leaf = torch.ones(3, requires_grad=True)
    first, second = (leaf * 2).split([1, 2])
    for tensor in (leaf, first, second):
        assert edge_of(tensor)[:2] == get_gradient_edge(tensor)[:2]
    entered = edge_of(ReceivedTensor(torch.ones(3)).enter_graph())
    found = run_backward([entered], [torch.ones(3)], [entered], accumulate=False)
    assert found[0] is not None


def test_it_accumulates_or_returns_the_gradients_of_edges() -> None:
    weight = torch.ones(3, requires_grad=True)
    middle = weight * 2
    unused = weight * 3
    output = middle * middle
    edges = [get_gradient_edge(middle), get_gradient_edge(unused)]
    found = run_backward([output], [torch.ones(3)], edges, accumulate=False)
    assert [weight.grad] == [None]
    assert found[0] is not None
    assert found[0].tolist() == [4, 4, 4]
    assert found[1] is None
    run_backward([get_gradient_edge(output := weight * 2)], [torch.full((3,), 5.0)], retain=True)
    run_backward([output], [torch.ones(3)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [12, 12, 12]


def test_the_gradient_of_all_uses_is_kept() -> None:
    received = ReceivedTensor(torch.tensor([1.0, -2.0]))
    entered = received.enter_graph()
    assert [received.gradient] == [None]
    (entered * entered + entered).sum().backward()
    assert received.gradient is not None
    assert received.gradient.tolist() == [3.0, -3.0]
    changed = ReceivedTensor(torch.tensor([1.0, -2.0]))
    torch.nn.functional.relu(changed.enter_graph(), inplace=True).sum().backward()
    assert changed.gradient is not None
    assert changed.gradient.tolist() == [1.0, 0.0]


def test_a_gradient_that_is_also_a_parameters_grad_has_no_memory_of_its_own() -> None:
    position = nn.Parameter(torch.ones(3, 4))
    received = [ReceivedTensor(torch.ones(1, 3, 4)) for _ in range(2)]
    kept: list[bool] = []
    for tensor in received:
        (2 * (tensor.enter_graph() + position[None])).sum().backward()
        assert tensor.gradient is not None
        kept.append(has_own_memory(tensor.gradient))
    # The first gradient is the parameter's, to which the second backward adds.
    assert received[0].gradient is not None
    assert received[0].gradient.sum().item() == 48
    assert kept == [False, True]


class AsksForAutocast(torch.autograd.Function):
    """Notes whether its backward runs under autocast."""

    states: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        AsksForAutocast.states.append(torch.is_autocast_enabled("cpu"))
        return gradients[0] * 2


class WithIsland(PlainLayer):
    """A layer with a part in float32 inside autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x).float()
        with torch.autocast("cpu", enabled=False):
            asked: torch.Tensor = AsksForAutocast.apply(hidden @ self.linear.weight)  # type: ignore[no-untyped-call]
        return asked


class Islands(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithIsland() for _ in range(4))


@pytest.mark.parametrize("splits", [False, True])
def test_the_backward_runs_outside_the_callers_autocast(splits: bool) -> None:
    model, x = Islands(), torch.randn(4, 4)
    whole = copy.deepcopy(model)
    AsksForAutocast.states.clear()
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(x)
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16):
        if splits:
            hidden = model.embedding(x)
            edge = get_gradient_edge(hidden)
            loss = model.head(nn.Sequential(*model.layers)(hidden)).mean()
            split = SplitBackward(BackwardAnalysis(), [edge], [loss])
            (gradient,) = split.input_gradients([torch.ones_like(loss)])
            split.weight_gradients()
            assert gradient is not None
            run_backward([edge], [gradient])
        else:
            pipeline = InProcessPipeline(model, 2, {"x": x}, transformer_layer_cls=WithIsland)
            (loss,) = pipeline.train({"x": x}, 1)
    assert torch.equal(loss, expected)
    assert AsksForAutocast.states
    assert not any(AsksForAutocast.states)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
