"""Items that forward assigns: in a copy where the backward, or another stage, needs the tensor itself; own inputs."""

import copy
from typing import Any

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
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(WIDTH) for _ in range(4))
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(2, *x.shape)
        for layer, between in zip(self.layers, self.between, strict=True):
            x = _all_of_them(layer(x), between)
            kept[0] += x * 2
            kept[1] = x
        return (x * kept[0]).mean() + kept.sum()


def _all_of_them(x: Tensor, layer: nn.Module) -> Tensor:
    return _filled_without_gradient(_filled(_scaled_items(x, layer), layer), layer)


def test_assigned_items_are_exact_over_stages() -> None:
    torch.manual_seed(0)
    assert_exact(_Model(), {"x": torch.randn(4, 3, WIDTH)}, layer_class=PlainLayer, stages=3)


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


def _train_on_pixels(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    alone = _Pixels()
    options: Any = {"transformer_layer_cls": PlainLayer, "broadcast_and_average_loss": True}
    model = NxDPPModel(copy.deepcopy(alone), num_microbatches=4, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(2):
        x = torch.rand(8, WIDTH) * 255
        ours: Any = model.run_train(x=x.clone())
        loss = alone(x=x)
        loss.backward()
        torch.testing.assert_close(ours, loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_an_input_that_forward_changes_in_place_trains_as_in_one_process() -> None:
    run_ranks(2, _train_on_pixels)
