"""Functions with a cache in code that runs on fake tensors: no fake tensor is left behind."""

from collections.abc import Callable
from functools import lru_cache, wraps

import torch
from torch import Tensor, nn

from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainModel


def _in_a_function(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    with_cache = lru_cache(function)

    @wraps(function)
    def call(number: int) -> Tensor:
        return with_cache(number)

    return call


@lru_cache
def positions(number: int) -> Tensor:
    return torch.arange(number, dtype=torch.float32)[:, None]


@_in_a_function
def scales(number: int) -> Tensor:
    return torch.full((number, 1), 0.5)


class Positions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x * scales(len(x)) + positions(len(x)), None


class Cached(PlainModel):
    """Asks for an output that is None, which a run on fake tensors answers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def prepare(self, hidden: Tensor) -> Tensor:
        hidden, mask = self.positions(hidden)
        return hidden if mask is None else hidden * mask


def test_a_step_after_a_run_on_fake_tensors_has_the_numbers_of_the_model() -> None:
    model, x = Cached(), torch.randn(8, 4)
    found = torch.stack([loss.detach() for loss in InProcessPipeline(model, 2).train({"x": x}, 4)])
    assert torch.equal(found, torch.stack([model(part).detach() for part in x.chunk(4)]))
