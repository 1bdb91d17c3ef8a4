"""Changes by modules and functions that are one node: those of torch are in the graph, a user's are refused by name."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.tracing.graph.errors import TracingError
from tests.support.run_ranks import run_ranks

WIDTH = 8


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).relu()


def bump(x: Tensor) -> None:
    x[:, :4] += 1


def bumped(x: Tensor) -> Tensor:
    x[:, :4] += 1
    return x


def total(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sum()


class Bump(nn.Module):
    def forward(self, x: Tensor) -> Tensor | None:
        bump(x)
        return None


class Bumped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return bumped(x)


class Net(nn.Module):
    """Changes the value before its layers, between them and after them."""

    def __init__(self, changes: Sequence[Sequence[Callable[[Any, Tensor], Tensor]]]) -> None:
        super().__init__()
        self.changes = changes
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(4))
        self.act, self.silu = nn.ReLU(inplace=True), nn.SiLU(inplace=True)
        self.bump, self.bumped = Bump(), Bumped()
        self.acts, self.alike = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), nn.Sequential(nn.Identity())
        self.inner = nn.Sequential(self.act, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.change(0, self.first(x))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = self.change(1, x)
        return nn.functional.mse_loss(self.change(2, x), target)

    def change(self, place: int, x: Tensor) -> Tensor:
        for change in self.changes[place]:
            x = change(self, x * 0.5 - 0.1)
        return x


def unused(change: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def keep(net: Any, x: Tensor) -> Tensor:
        change(net, x)
        return x

    return keep


RIGHT: tuple[list[Callable[[Any, Tensor], Tensor]], ...] = (
    [unused(lambda net, x: net.act(input=x)), lambda net, x: bumped(x), unused(lambda net, x: net.silu(x))],
    [lambda net, x: net.bumped(x), unused(lambda net, x: net.acts(x))],
    [
        unused(lambda net, x: nn.LeakyReLU(inplace=True)(x)),
        lambda net, x: net.act(x) + x,
        unused(lambda net, x: net.first(x)),
    ],
)
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a function": (unused(lambda net, x: bump(x)), r"bump changes a value in place .*\n.*\nLet bump return"),
    "a module": (unused(lambda net, x: net.bump(x)), r"self\.bump changes a value in place"),
    "a function with another result": (lambda net, x: x * total(x), "total changes a value in place"),
    "a sequence with another result": (lambda net, x: x + net.inner(x), r"self\.inner changes a value in place"),
    "under the name of a sequence": (unused(lambda net, x: net.alike(x).mul_(2)), "same memory"),
}


def wrapped(changes: Sequence[Sequence[Callable[[Any, Tensor], Tensor]]]) -> NxDPPModel:
    return NxDPPModel(
        made(changes),
        transformer_layer_cls=Block,
        num_microbatches=2,
        autowrap_functions=[bump, bumped, total],
        broadcast_and_average_loss=True,
    )


def made(changes: Sequence[Sequence[Callable[[Any, Tensor], Tensor]]]) -> Net:
    torch.manual_seed(0)
    return Net(changes)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, WIDTH, generator=generator) for name in ("x", "target")}


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    alone, model = made(RIGHT), wrapped(RIGHT)
    expected = alone(**batch())
    expected.backward()
    loss: Any = model.run_train(**batch())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    gradients = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, msg=name)
    for name, (change, sentence) in REFUSED.items():
        with pytest.raises(TracingError, match=sentence):
            pytest.fail(f"{name}: {wrapped([[change]] * 3).run_train(**batch())}")


def test_a_change_is_that_of_one_process_or_refused() -> None:
    run_ranks(2, train)
