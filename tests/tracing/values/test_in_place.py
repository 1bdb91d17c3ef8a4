"""Items that forward assigns: in a copy where the backward, or another stage, needs the tensor itself; own inputs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.exact import assert_exact
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import PlainLayer

WIDTH = 4


def _scaled_items(x: Tensor, layer: nn.Module) -> Tensor:
    scaled = torch.sin(x)
    scaled[..., 2:] *= layer(x)[..., :2]
    scaled[..., :2] *= layer(x)[..., 2:].sum(-1, keepdim=True)
    return scaled


def _filled(x: Tensor, layer: nn.Module) -> Tensor:
    filled = torch.empty(2, *x.shape, dtype=x.dtype)
    for index in range(2):
        filled[index] = layer(x) * (index + 1)
    return filled.sum(0)


def _filled_without_gradient(x: Tensor, layer: nn.Module) -> Tensor:
    filled = torch.zeros(2, *x.shape)
    filled[0] = layer(x).detach()
    x = layer(x)
    filled[1, :, 0] = 1
    return x + filled.sum(0)


class _Model(nn.Module):
    def __init__(self, change: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(WIDTH) for _ in range(4))
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(2, *x.shape)
        for layer, between in zip(self.layers, self.between, strict=True):
            x = self.change(layer(x), between)
            kept[0] += x * 2
            kept[1] = x
        return (x * kept[0]).mean() + kept.sum()


@pytest.mark.parametrize("change", [_scaled_items, _filled, _filled_without_gradient])
def test_assigned_items_are_exact_over_stages(change: Callable[[Tensor, nn.Module], Tensor]) -> None:
    torch.manual_seed(0)
    assert_exact(_Model(change), {"x": torch.randn(4, 3, WIDTH)}, layer_class=PlainLayer, stages=3)


class _Pixels(nn.Module):
    """Scales its input in place, as scripts for images do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x.div_(255)
        x[:, 0] = 1
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _train_on_pixels(rank: int, ranks: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    torch.manual_seed(0)
    alone = _Pixels()
    options: Any = {"transformer_layer_cls": PlainLayer, "broadcast_and_average_loss": True}
    model = NxDPPModel(copy.deepcopy(alone), num_microbatches=4, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(4):
        x = torch.rand(8, WIDTH) * 255
        ours: Any = model.run_train(x=x.clone())
        loss = alone(x=x)
        loss.backward()
        torch.testing.assert_close(ours, loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_an_input_that_forward_changes_in_place_trains_as_in_one_process(ranks: int) -> None:
    run_ranks(ranks, _train_on_pixels, ranks)
