"""Training modes: a part in evaluation mode keeps it when the model is wrapped, and in ``train()``."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.in_turn import run_in_turn


class Layer(nn.Module):
    """A layer with statistics, and a factor that the mode decides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x))) * (2 if self.training else 3)


class Stack(nn.Module):
    """Layers below a module that the mode changes, too. It keeps its first layer in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.layers[0].eval()
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * (5 if self.training else 7)


class Model(nn.Module):
    """Keeps its first norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.stack = Stack()
        self.head = nn.Linear(4, 1)
        self.train()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.stack(self.norm(self.embedding(x)))).square().mean()
        return result


def _change(module: nn.Module, change: str) -> None:
    stack: Any = module.stack
    if change == "stack.eval()":
        stack.eval()
    elif change == "layers[2].eval()":
        stack.layers[2].eval()


def compare(rank: int, change: str) -> None:
    module, x = Model(), torch.randn(8, 4)
    whole = copy.deepcopy(module)
    _change(module, change)
    _change(whole, change)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(module, transformer_layer_cls=Layer, num_microbatches=2, broadcast_and_average_loss=True)
    for step in range(3):
        whole.zero_grad()
        wrapped.zero_grad()
        losses = []
        for part in x.chunk(2):
            losses.append(whole(part))
            (losses[-1] / 2).backward()
        loss = wrapped.run_train(x=x)
        assert isinstance(loss, Tensor)
        assert torch.equal(loss, torch.stack(losses).mean())
        expected = whole.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in wrapped.local_state_dict().items())
        for name, parameter in wrapped.local_named_parameters():
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), (step, name)  # type: ignore[arg-type]
        modes = {name: part.training for name, part in whole.named_modules()}
        assert {n: part.training for n, part in wrapped.local_named_modules()}.items() <= modes.items()
        # The second step follows train(), the third one a mode of a single module.
        if step == 0:
            assert not wrapped.eval().training
            whole.train()
            wrapped.train()
        else:
            _change(module, "layers[2].eval()")
            _change(whole, "layers[2].eval()")


def test_parts_in_evaluation_mode_are_those_of_one_process() -> None:
    run_in_turn(2, *((compare, change) for change in ("", "stack.eval()", "layers[2].eval()")))
