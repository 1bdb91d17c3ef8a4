"""Units of models with parameters in odd places, and of models that a program changes between steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks

HIDDEN = 8
WORDS = 17
EQUAL = 1e-12


class Layer(nn.Module):
    """A layer with a scale that has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, T, HIDDEN)`` to the same shape."""
        out: torch.Tensor = x + self.scale * self.second(torch.tanh(self.first(x)))
        return out


class Model(nn.Module):
    """A model whose forward uses positions, and the embedding as a head, itself."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.positions = nn.Parameter(torch.randn(5, HIDDEN))
        self.start = nn.Parameter(torch.randn(1))
        self.layers = nn.ModuleList(self.layer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``(B, 5)`` to a loss of shape ()."""
        x = self.run_layers(self.embed(ids) + self.positions * self.start)
        return functional.cross_entropy(functional.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, T, HIDDEN)`` to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class ListLayer(Layer):
    """A layer that reads a weight from a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, T, HIDDEN)`` to the same shape."""
        return super().forward(x) + functional.linear(x, self.weights[0])


class PassingLayer(Layer):
    """A layer that gives a view of its bias to the layers after it."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Map ``(B, T, HIDDEN)`` and ``(1, HIDDEN)`` to the same shapes."""
        bias = self.first.bias.unsqueeze(0) if bias is None else bias
        return super().forward(x) + bias, bias


class PassingModel(Model):
    """A model of such layers."""

    layer = PassingLayer

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class ListModel(Model):
    """A model of layers with lists."""

    layer = ListLayer


def wrap(module: Model, shards: bool, resharding: bool | None = None) -> Any:
    model = NxDPPModel(
        module.double(), num_microbatches=4, transformer_layer_cls=module.layer, broadcast_and_average_loss=True
    )
    model.move_model_to_device()
    return nxdpp.fully_shard(model, reshard_after_forward=resharding) if shards else model


def new(kind: type[Model] = Model, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return kind()


def train(model: Any, steps: int = 2, between: Callable[[Any], None] | None = None) -> dict[str, torch.Tensor]:
    """Losses and the parameters after the steps, whole."""
    optimizer = torch.optim.SGD(model.local_parameters(), lr=0.1, momentum=0.9)
    found = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * parallel_state.get_data_parallel_rank() + step)
        optimizer.zero_grad()
        found[f"loss {step}"] = model.run_train(ids=torch.randint(0, WORDS, (8, 5), generator=generator))
        optimizer.step()
        if between is not None and step == 0:
            between(model)
    for name, parameter in model.local_named_parameters():
        value = parameter.detach()
        found[name] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return found


def first_layer(model: Any) -> Any:
    return next(module for module in model.local_modules() if isinstance(module, Layer))


def _load_whole(model: Any) -> None:
    model.load_state_dict(new(seed=5).double().state_dict())


def compare_all(rank: int) -> dict[str, float]:
    """Greatest differences from whole replicas."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    found = {}
    whole, loaded = train(wrap(new(), shards=False)), train(wrap(new(), shards=False), between=_load_whole)
    found["steps, resharding"] = distance(train(wrap(new(), True, True)), whole)
    found["whole state loaded"] = distance(train(wrap(new(), True), between=_load_whole), loaded)
    passing = train(wrap(new(PassingModel), shards=False))
    found["a view"] = distance(train(wrap(new(PassingModel), True)), passing)
    return found


def distance(ours: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == whole.keys()
    return max((ours[key] - whole[key]).abs().max().item() for key in whole)


def replace(rank: int) -> None:
    """Replace a parameter between two steps."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    model = wrap(new(), shards=True)
    train(model, steps=1)
    first_layer(model).first.weight = nn.Parameter(torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64))
    train(model, steps=1)


def hold(rank: int) -> None:
    """Train with a parameter that a list holds."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    train(wrap(new(ListModel), shards=True), steps=1)


def test_odd_models_train_as_whole_replicas() -> None:
    for differences in run_ranks(2, compare_all):
        for name, greatest in differences.items():
            assert greatest < EQUAL, f"{name} by {greatest}"


@pytest.mark.parametrize(
    ("run", "words"),
    [(replace, "another tensor has its place"), (hold, "fully_shard has put another in its place")],
)
def test_what_would_train_another_parameter_ends_the_step(run: Callable[[int], None], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(2, run)
