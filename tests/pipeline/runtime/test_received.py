"""A tensor from another stage may be changed in place, and its gradient is kept."""

import torch
from torch import nn

from nxdpp.pipeline.runtime.received import Arrival, own_memory


def test_the_gradient_of_all_uses_is_kept() -> None:
    arrival = Arrival(torch.tensor([1.0, -2.0]))
    entered = arrival.enter_graph()
    assert entered.requires_grad
    (entered * entered + entered).sum().backward()
    assert arrival.gradient is not None
    assert arrival.gradient.tolist() == [3.0, -3.0]


def test_it_may_be_changed_in_place() -> None:
    arrival = Arrival(torch.tensor([1.0, -2.0]))
    torch.nn.functional.relu(arrival.enter_graph(), inplace=True).sum().backward()
    assert arrival.gradient is not None
    assert arrival.gradient.tolist() == [1.0, 0.0]


def test_what_takes_no_part_has_no_gradient() -> None:
    arrival = Arrival(torch.ones(2))
    arrival.enter_graph()
    assert arrival.gradient is None
    assert not Arrival(torch.ones(2)).take().requires_grad


def test_a_gradient_that_has_become_a_parameters_is_copied() -> None:
    position = nn.Parameter(torch.ones(3, 4))
    arrivals = [Arrival(torch.ones(1, 3, 4)) for _ in range(2)]
    kept = []
    for arrival in arrivals:
        (2 * (arrival.enter_graph() + position[None])).sum().backward()
        assert arrival.gradient is not None
        kept.append(own_memory(arrival.gradient))
    # Without the copy, what the second backward adds to the parameter is in the first gradient, too.
    assert [gradient.sum().item() for gradient in kept] == [24, 24]
    assert kept[0] is not arrivals[0].gradient
    assert kept[1] is arrivals[1].gradient
