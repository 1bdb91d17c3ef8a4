"""Hooks of gradients on values between layers are exact, at and beside cuts, and in split backwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.models import gradient_differences
from tests.support.run_ranks import run_ranks
from tests.support.sized_models import train_whole
from tests.support.traced_models import PlainLayer, PlainModel

INPUTS = {"x": torch.arange(16.0).reshape(4, 4) / 16}


class Hooked(PlainModel):
    """A hook after the layer of that number, for a trace with gradients."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.scale = 3.0
        self.seen: list[float] = []

    def hook(self, gradient: Tensor) -> Tensor:
        self.seen.append(float(gradient.sum()))
        return gradient * self.scale

    def register(self, hidden: Any) -> Any:
        if hidden.requires_grad:
            hidden.register_hook(self.hook)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if number == self.after:
                hidden = self.register(hidden)
        result: Tensor = self.head(hidden).mean()
        return result


class Late(Hooked):
    """Registered after a use of the value on a later stage."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[1](self.layers[0](self.embedding(x)))
        later = self.layers[2](hidden)
        hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        result: Tensor = self.head(self.layers[3](later)).mean()
        return result


@pytest.mark.parametrize("after", [1, 2])
def test_a_hook_is_exact(after: int) -> None:
    pipeline = assert_exact(Hooked(after), INPUTS, PlainLayer)
    model: Any = pipeline.partition.module
    assert len(model.seen) == 4
    with torch.no_grad():
        pipeline.train(INPUTS, 2, backward=False)


def test_a_hook_that_is_registered_after_a_use_on_a_later_stage() -> None:
    assert_exact(Late(0), INPUTS, PlainLayer, 4)


class WithMask(Hooked):
    def register(self, hidden: Any) -> Any:
        mask = hidden > 0
        hidden.register_hook(lambda gradient: gradient * mask)
        return hidden


class MaskedGradient(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden.register_hook(lambda gradient: gradient * mask)
        return hidden


class WithModule(Hooked):
    def __init__(self, after: int) -> None:
        super().__init__(after)
        self.masked = MaskedGradient()

    def register(self, hidden: Any) -> Any:
        return self.masked(hidden, hidden > 0)


class Removes(Hooked):
    def register(self, hidden: Any) -> Any:
        hidden.register_hook(self.hook).remove()
        return hidden


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (WithMask, r"a hook on .* uses other values of forward.*a module of its own, which takes both values"),
        (Removes, r"ends with it\. Leave remove\(\) out"),
    ],
)
def test_hooks_that_a_graph_cannot_hold(model: Any, message: str) -> None:
    with pytest.raises(TracingError, match=message):
        assert_exact(model(1), INPUTS, PlainLayer)


def test_a_hook_of_several_values_is_in_a_module_of_its_own() -> None:
    assert_exact(WithModule(1), INPUTS, PlainLayer)


def train(rank: int, schedule: str) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    whole = Hooked(1)
    wrapped = NxDPPModel(Hooked(1), PlainLayer, num_microbatches=2, schedule=schedule)
    wrapped.run_train(**INPUTS)
    train_whole(whole, INPUTS, 2)
    return gradient_differences(wrapped, whole)


def test_a_hook_at_a_cut_with_a_split_backward() -> None:
    assert run_ranks(2, train, "zb1p") == [{}] * 2
