"""Received tensors in the autograd graph; ``run_backward`` as ``torch.autograd.backward`` and ``grad``."""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from nxdpp.pipeline.backward.run import ReceivedTensor, has_own_memory, run_backward


def test_it_accumulates_into_leaves() -> None:
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    run_backward([get_gradient_edge(output)], [torch.full((3,), 5.0)], retain=True)
    run_backward([output], [torch.ones(3)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [12, 12, 12]


def test_it_returns_gradients_of_edges_without_accumulating() -> None:
    weight = torch.ones(3, requires_grad=True)
    middle = weight * 2
    unused = weight * 3
    output = middle * middle
    edges = [get_gradient_edge(middle), get_gradient_edge(unused)]
    found = run_backward([output], [torch.ones(3)], edges, accumulate=False)
    assert weight.grad is None
    assert found[0] is not None
    assert found[0].tolist() == [4, 4, 4]
    assert found[1] is None


def test_the_gradient_of_all_uses_is_kept() -> None:
    received = ReceivedTensor(torch.tensor([1.0, -2.0]))
    entered = received.enter_graph()
    assert entered.requires_grad
    (entered * entered + entered).sum().backward()
    assert received.gradient is not None
    assert received.gradient.tolist() == [3.0, -3.0]


def test_a_received_tensor_may_be_changed_in_place() -> None:
    received = ReceivedTensor(torch.tensor([1.0, -2.0]))
    torch.nn.functional.relu(received.enter_graph(), inplace=True).sum().backward()
    assert received.gradient is not None
    assert received.gradient.tolist() == [1.0, 0.0]


def test_an_unused_tensor_has_no_gradient() -> None:
    received = ReceivedTensor(torch.ones(2))
    received.enter_graph()
    assert received.gradient is None
    assert not ReceivedTensor(torch.ones(2)).take().requires_grad


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
