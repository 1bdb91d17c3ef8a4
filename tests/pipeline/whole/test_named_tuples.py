"""Layers hand on named tuples whose constructors look at their tensors, as ``PackedSequence`` does."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import gradient_differences
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

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
        return pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_in_one_process(ranks: int) -> None:
    assert run_ranks(ranks, train, ranks) == [[]] * ranks
