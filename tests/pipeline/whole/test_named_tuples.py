"""Layers hand on named tuples: of constructors that look at their tensors, as ``PackedSequence`` does, and torch's."""

import copy
from enum import Flag
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import gradient_differences
from tests.support.run_ranks import run_ranks

WIDTH = 4


class _Fields(NamedTuple):
    x: Tensor
    y: Tensor


class Pair(_Fields):
    """Two tensors of one shape."""

    def __new__(cls, x: Tensor, y: Tensor) -> "Pair":
        if x.shape != y.shape:
            raise ValueError("two shapes")
        return super().__new__(cls, x, y)


class PairLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.linear(pair.x), pair.y + pair.x)


class Recurrent(nn.Module):
    """An LSTM over sentences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, packed: PackedSequence) -> Any:
        return self.lstm(packed)[0]


class OfPairs(nn.Module):
    def __init__(self, layer: type[nn.Module] = PairLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def first(self, x: Tensor) -> Any:
        return Pair(x, x)

    def loss(self, value: Any) -> Tensor:
        loss: Tensor = (value.x * value.y).mean()
        return loss

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x)
        for layer in self.layers:
            value = layer(value)
        return self.loss(value)


class Packs(nn.Module):
    """Packs sentences; a module that is one node of the graph."""

    def forward(self, x: Tensor) -> PackedSequence:
        return pack_padded_sequence(x, torch.tensor([5, 3], device="cpu"), batch_first=True)


class Unpacks(nn.Module):
    def forward(self, packed: PackedSequence) -> Tensor:
        return pad_packed_sequence(packed, batch_first=True)[0]


class OfSentences(OfPairs):
    def __init__(self) -> None:
        super().__init__(Recurrent)
        self.packs, self.unpacks = Packs(), Unpacks()

    def first(self, x: Tensor) -> Any:
        return self.packs(x)

    def loss(self, value: Any) -> Tensor:
        loss: Tensor = self.unpacks(value).square().sum()
        return loss


def train(rank: int, ranks: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    different: list[str] = []
    for model, layer in ((OfPairs, PairLayer), (OfSentences, Recurrent)):
        torch.manual_seed(0)
        module = model()
        whole = copy.deepcopy(module)
        x = torch.randn(4, 5, WIDTH)
        wrapped = NxDPPModel(
            module, layer, 2, leaf_module_cls=[Packs, Unpacks], broadcast_and_average_loss=True, input_names=["x"]
        )
        for _ in range(2):
            loss = wrapped.run_train(x=x)
            losses = []
            for part in x.chunk(2):
                losses.append(whole(part))
                (losses[-1] / 2).backward()
            different += [] if torch.equal(loss, torch.stack(losses).mean()) else [f"loss of {model.__name__}"]
            different += gradient_differences(wrapped, whole)
    return different


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


class Right(Flag):
    READ = 1
    WRITE = 2


class Marks(nn.Module):
    """Returns flags, which no other rank could make from their name; a module that is one node of the graph."""

    def forward(self, x: Tensor) -> Any:
        return x, Right.READ | Right.WRITE


class Unsendable(OfResults):
    def __init__(self) -> None:
        super().__init__()
        self.marks = Marks()

    def forward(self, x: Tensor) -> Any:
        return self.marks(super().forward(x)["best"].values)


def train_results(rank: int, ranks: int, schedule: str) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
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


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (2, "zb-v"), (4, "1f1b")])
def test_results_of_torch_go_over_ranks(ranks: int, schedule: str) -> None:
    assert run_ranks(ranks, train_results, ranks, schedule) == [[]] * ranks


def evaluate_unsendable(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = NxDPPModel(Unsendable(), Best, 2, leaf_module_cls=[Marks])
    model.run_eval(x=torch.randn(6, WIDTH, WIDTH), everywhere=True)


def test_the_sender_refuses_what_no_rank_could_make() -> None:
    with pytest.raises(AssertionError, match="rank 1 failed with TypeError") as caught:
        run_ranks(2, evaluate_unsendable)
    assert "a Right cannot be sent to another stage" in str(caught.value)
    assert "sent bytes that are no value" not in str(caught.value)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_as_in_one_process(ranks: int) -> None:
    assert run_ranks(ranks, train, ranks) == [[]] * ranks
