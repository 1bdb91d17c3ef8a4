"""Modes of torch in the spine: losses and gradients of one process, on any number of stages."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import autocast, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import options_for

WIDTH = 8


class Layer(nn.Module):
    """Attention over (B, T, H), and a linear module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).unsqueeze(1)
        result: torch.Tensor = x + nn.functional.scaled_dot_product_attention(q, q, q).squeeze(1) + self.linear(x)
        return result


class Model(nn.Module):
    """Four layers of input (B, T, H); a subclass chooses modes for parts of its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(hidden)).float().square().mean()
        return result


def check(model: nn.Module) -> None:
    """Compare two steps of two microbatches, losses and gradients, with one process."""
    whole = copy.deepcopy(model)
    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    pipeline = InProcessPipeline(model, 3, {"x": x[:2]}, options_for(model, Layer))
    for _ in range(2):
        expected = []
        for part in x.chunk(2):
            loss = whole(part)
            (loss / 2).backward()
            expected.append(loss.detach())
        losses = pipeline.train({"x": x}, 2)
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        for (name, parameter), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
            one, other = parameter.grad, reference.grad
            assert one is other if one is None or other is None else torch.equal(one, other), name
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def _low(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@contextmanager
def _own_block() -> Iterator[None]:
    with _low():
        yield


@contextmanager
def _math() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


OBJECT = torch.autocast("cpu", dtype=torch.bfloat16)
BLOCKS: dict[str, Callable[[], Any]] = {
    "torch.autocast": _low,
    "from torch import autocast": lambda: autocast("cpu", torch.bfloat16),
    "a block of its own": _own_block,
    "sdpa_kernel": _math,
    "a block that was made before": lambda: OBJECT,
    "torch.set_grad_enabled": lambda: torch.set_grad_enabled(False),
}


class Around(Model):
    """The middle layers in a block."""

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__()
        self.__dict__["block"] = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](self.embedding(x))
        with self.__dict__["block"]():
            hidden = self.layers[1](hidden)
            hidden = self.layers[2](hidden * 2)
        return self.loss(self.layers[3](hidden))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_under_any_name(name: str) -> None:
    check(Around(BLOCKS[name]))


@torch.no_grad()
def _frozen(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(hidden)
    return result


@torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[untyped-decorator]
def _in_low(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(hidden)
    return result


class Decorated(Model):
    """Functions with decorators, and a decorated forward."""

    @torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = _frozen(self.layers[0], self.embedding(x))
        for layer in list(self.layers)[1:]:
            hidden = _in_low(layer, hidden)
        return self.loss(hidden)


class Islands(Model):
    """A float32 island and gradients inside no_grad."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _low():
            hidden = self.layers[0](self.embedding(x))
            with torch.autocast("cpu", enabled=False):
                hidden = self.layers[1](hidden.float())
            with torch.no_grad():
                scale = self.norm(hidden)
                with torch.enable_grad():
                    hidden = self.layers[2](hidden)
            hidden = self.layers[3](hidden * scale)
            with torch.autocast("cpu", enabled=False):
                return self.loss(hidden.float())


class WeightTwice(Model):
    """A head that runs twice in one block and once in another; a parameter used on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _low():
            hidden = self.embedding(self.embedding(x))
            for layer in self.layers:
                hidden = layer(hidden)
            hidden = self.shared(self.shared(hidden)) + self.shared(hidden.float())
        with _low():
            return self.loss(self.shared(hidden))


@pytest.mark.parametrize("cls", [Decorated, Islands, WeightTwice])
def test_modes_of_torch(cls: type[Model]) -> None:
    check(cls())


class Fails(Model):
    """Raises inside a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](self.embedding(x))
        with torch.no_grad(), _low(), sdpa_kernel(SDPBackend.MATH):
            hidden = self.layers[1](hidden)
            hidden = hidden.view(-1, 7)
        return self.loss(self.layers[3](self.layers[2](hidden)))


def test_a_stage_that_raises_leaves_no_mode() -> None:
    model = Fails()
    x = torch.ones(2, 5, WIDTH)
    pipeline = InProcessPipeline(model, 2, {"x": x}, options_for(model, Layer))
    with pytest.raises(RuntimeError, match="shape"):
        pipeline.train({"x": x}, 1)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
