"""Modules whose ``forward`` has only inputs with defaults: with none of them, or some, they train as in one process."""

from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import reference
from tests.support.run_ranks import run_ranks

ROWS, WIDTH = 4, 8


class Optional(nn.Module):
    """Layers over ``x``, by default over a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Parameter(torch.randn(ROWS // 2, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the loss and the last values."""
        hidden = self.start if x is None else x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        errors = hidden if labels is None else hidden - labels
        return {"loss": errors.square().mean(), "hidden": hidden}


def inputs(*names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "labels")}
    return {name: values[name] for name in names}


def wrapped(module: nn.Module) -> NxDPPModel:
    return NxDPPModel(module, num_microbatches=2, transformer_layer_cls=nn.Linear, broadcast_and_average_loss=True)


def compare(model: NxDPPModel, whole: nn.Module, *names: str) -> None:
    model.zero_grad()
    whole.zero_grad()
    loss = model.run_train(**inputs(*names))
    expected = whole(**inputs(*names))["loss"]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        ours, wanted = (torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, theirs[name]))
        torch.testing.assert_close(ours, wanted, msg=name)


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    module = Optional()
    whole = reference(module)
    model = wrapped(module)
    for names in ((), ("x",), ("x", "labels"), ()):
        compare(model, whole, *names)


def test_inputs_with_defaults_may_be_left_out() -> None:
    run_ranks(2, train)
