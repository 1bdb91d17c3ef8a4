"""A tensor from another stage may be changed in place, and its gradient is kept."""

import torch

from nxdpp.pipeline.arrival import Arrival


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
