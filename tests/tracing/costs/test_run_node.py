"""Runs of single nodes: they change no tensor that a function reads beside its arguments."""

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from nxdpp.tracing.costs.node_parts import CountedParts, count_parts
from nxdpp.tracing.costs.run_node import NodeRun, backward, run_of


def _backward(run: NodeRun) -> None:
    backward(run, run.forward(), torch.ones_like)


def _count_parts(run: NodeRun) -> None:
    count_parts(run, CountedParts(balance=1.0))


@pytest.mark.parametrize("run_backward", [_backward, _count_parts])
@pytest.mark.parametrize("gradient", [None, torch.full((3,), 2.0)])
def test_gradients_of_a_closures_parameters_are_kept(
    run_backward: Callable[[NodeRun], None], gradient: torch.Tensor | None
) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = gradient
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(lambda values: (values * weight).sum(), (x,))

    run_backward(run_of(node, nn.Module(), {x: torch.ones(3, requires_grad=True)}))

    assert weight.grad is gradient
    assert gradient is None or torch.equal(gradient, torch.full((3,), 2.0))
