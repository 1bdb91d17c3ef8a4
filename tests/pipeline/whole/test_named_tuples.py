"""Layers hand on named tuples of torch, and return them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks

WIDTH = 4


class Best(nn.Module):
    """Hands on the two best values of each row and their places, in a named tuple of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, best: Any) -> Any:
        x = x + self.linear(x) * best.values.sum(-1, keepdim=True)
        return x, x.topk(2, -1)


class OfResults(nn.Module):
    """Returns the results of a search, a sort and a decomposition of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Best() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        best = x.topk(2, -1)
        for layer in self.layers:
            x, best = layer(x, best)
        return {"best": best, "largest": x.max(-1), "sorted": x.sort(-1), "slogdet": torch.linalg.slogdet(x)}


def of_results(output: Any, labels: Tensor) -> Tensor:
    loss: Tensor = (output["best"].values.sum(-1) - labels).square().mean() + output["largest"].values.mean()
    return loss


def train_results(schedule: str) -> list[str]:
    torch.manual_seed(0)
    whole, x = OfResults(), torch.randn(6, WIDTH, WIDTH)
    labels = torch.randn(6, WIDTH)
    model = NxDPPModel(
        copy.deepcopy(whole), Best, 2, schedule=schedule, loss_fn=of_results, broadcast_and_average_loss=True
    )
    different: list[str] = []
    for _ in range(2):
        loss = model.run_train(x=x, labels=labels)
        expected = of_results(whole(x), labels)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    own = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad)
    with torch.no_grad():
        expected = whole(x)
    output = model.run_eval(x=x, everywhere=True)
    for name, value in expected.items():
        different += [] if type(output[name]) is type(value) else [f"{name} is a {type(output[name])}"]
        torch.testing.assert_close(tuple(output[name]), tuple(value))
    return different


def train_all(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return train_results("1f1b") + train_results("zb-v")


def test_as_in_one_process() -> None:
    assert run_ranks(2, train_all) == [[], []]
