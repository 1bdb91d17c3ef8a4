"""A moved model keeps its values, its ties and the attributes of its parameters."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.tensor.move_model_to_device import move_model_to_device


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.head.weight.tensor_model_parallel = True  # type: ignore[attr-defined]


def test_new_parameters_keep_attributes_and_ties() -> None:
    model = _Tied()
    before = model.embedding.weight
    move_model_to_device(model, torch.device("meta"))
    assert model.embedding.weight is not before, "torch must make a new parameter here"
    assert model.embedding.weight.tensor_model_parallel is True  # type: ignore[attr-defined]
    assert model.head.weight is model.embedding.weight
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_new_parameters_keep_hooks_of_their_gradients() -> None:
    model = _Tied()
    calls = []
    handles = [
        model.head.weight.register_hook(lambda gradient: calls.append("gradient")),
        model.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated")),
    ]
    move_model_to_device(model, "meta")
    model.head.weight.sum().backward()
    assert calls == ["gradient", "accumulated"]
    for handle in handles:
        handle.remove()
    model.head.weight.sum().backward()
    assert calls == ["gradient", "accumulated"]


class _Own(nn.Parameter):
    """Parameter class of a user."""


def test_new_parameters_keep_class_gradient_and_requires_grad() -> None:
    model = nn.Linear(2, 2)
    model.weight = _Own(torch.ones(2, 2))
    model.weight.grad = torch.ones(2, 2)
    model.bias.requires_grad_(False)
    before = model.weight
    move_model_to_device(model, "meta")
    assert model.weight is not before
    assert type(model.weight) is _Own
    assert model.weight.grad is not None
    assert model.weight.grad.is_meta
    assert not model.bias.requires_grad


@pytest.mark.parametrize("device", ["cuda:77", None])
def test_missing_devices_are_refused(device: Any) -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=rf"there is no device '{device}' here: .* Give one of this machine"):
        move_model_to_device(model, device)


def test_a_model_without_values_is_refused_and_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"2 parameters or buffers .*1\.weight is the first.*to_empty"):
        move_model_to_device(model, "cpu")
