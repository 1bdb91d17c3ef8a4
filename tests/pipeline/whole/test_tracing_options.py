"""Each tracing option on a model that needs it to be cut, over several processes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.plain_models import WIDTH, Base, Block
from tests.support.run_ranks import run_ranks


def by_sign(hidden: torch.Tensor) -> torch.Tensor:
    """Branch on the data."""
    return hidden * 2 if hidden.sum() > 0 else hidden / 2


class Decision(nn.Module):
    """The same branch in a module."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return by_sign(hidden)


class CallsFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.close(by_sign(self.through(self.blocks, by_sign(self.embedding(x)))))


class HasModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.decision = Decision()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.close(self.decision(self.through(self.blocks, self.embedding(x))))


class ChecksItself(Base):
    """A branch on a value that only a custom tracer can decide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == x).all():
            return self.run(x)
        return self.run(torch.zeros(1, WIDTH))


class TrustingTracer(fx.Tracer):
    def to_bool(self, obj: fx.Proxy) -> bool:
        return True


class Runner(nn.Module):
    """A module that runs layers that are registered in another module."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = tuple(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class RunsElsewhere(Base):
    def __init__(self) -> None:
        super().__init__()
        self.runner = Runner(list(self.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.close(self.runner(self.embedding(x)))


# Model, arguments that fail, the error message, arguments that work.
OPTIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, dict[str, Any]]] = {
    "autowrap_functions": (CallsFunction, {}, "in by_sign", {"autowrap_functions": [by_sign]}),
    "leaf_module_cls": (
        HasModule,
        {"tracer_cls": "torch"},
        "in by_sign",
        {"tracer_cls": "torch", "leaf_module_cls": ["Decision"]},
    ),
    "a tracer that answers": (ChecksItself, {}, "in forward: if", {"tracer_cls": TrustingTracer}),
    "torch": (RunsElsewhere, {}, "Not run with the inputs", {"tracer_cls": "torch"}),
}


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    for name, (make, without, why, arguments) in OPTIONS.items():
        torch.manual_seed(1)
        model = make()
        whole = copy.deepcopy(model)
        with pytest.raises((RuntimeError, ValueError), match=why):
            NxDPPModel(copy.deepcopy(model), transformer_layer_cls=Block, num_microbatches=4, **without)
        wrapped = NxDPPModel(model, transformer_layer_cls=Block, num_microbatches=4, **arguments)
        x = torch.randn(8, WIDTH)
        loss = wrapped.run_train(x=x)
        losses = []
        for part in x.chunk(4):
            value = whole(part)
            (value / 4).backward()
            losses.append(value.detach())
        assert loss is None or (isinstance(loss, torch.Tensor) and torch.equal(loss, torch.stack(losses).mean())), name
        expected = dict(whole.named_parameters())
        for parameter_name, parameter in wrapped.local_named_parameters():
            gradient = expected[parameter_name].grad
            assert parameter.grad is not None
            assert gradient is not None
            assert torch.equal(parameter.grad, gradient), (name, parameter_name)


def test_a_model_that_needs_an_option_is_exact_with_it() -> None:
    run_ranks(3, train)
