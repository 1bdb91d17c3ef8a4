"""The engine's call does what ``torch.autograd.backward`` and ``grad`` do."""

import torch
from torch.autograd.graph import get_gradient_edge

from nxdpp.pipeline.backward.run import run_backward


def test_it_accumulates_into_leaves() -> None:
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    run_backward([get_gradient_edge(output)], [torch.full((3,), 5.0)], retain=True)
    run_backward([output], [torch.ones(3)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [12, 12, 12]


def test_it_gives_gradients_of_places_without_accumulating() -> None:
    weight = torch.ones(3, requires_grad=True)
    middle = weight * 2
    unused = weight * 3
    output = middle * middle
    places = [get_gradient_edge(middle), get_gradient_edge(unused)]
    found = run_backward([output], [torch.ones(3)], places, accumulate=False)
    assert weight.grad is None
    assert found[0] is not None
    assert found[0].tolist() == [4, 4, 4]
    assert found[1] is None
