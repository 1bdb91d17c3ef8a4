"""A model that is nothing but a stack of layers, and how to cut it by hand."""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.compare.job import Job


class Stack(nn.Module):
    """``start`` scales the input, so that the first stage has an input-gradient like the others; then layers."""

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.rand(width) + 0.5)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss: the mean of what the last layer makes."""
        hidden = x * self.start
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.mean()


class StackStage(nn.Module):
    """Some of the layers of a stack."""

    def __init__(self, stack: Stack, own: range) -> None:
        super().__init__()
        self.start = stack.start if own.start == 0 else None
        self.layers = nn.ModuleDict({str(index): stack.layers[index] for index in own})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From the hidden states of the stage before to this one's."""
        if self.start is not None:
            hidden = hidden * self.start
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def stack_job(
    make_layer: Callable[[], nn.Module],
    layers: int,
    hidden: tuple[int, ...],
    microbatches: int,
) -> Job:
    """A stack of ``layers`` layers whose hidden states have the size ``hidden`` for one microbatch."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return Stack([make_layer() for _ in range(layers)], hidden[-1])

    torch.manual_seed(1)
    x = torch.rand(hidden[0] * microbatches, *hidden[1:]) + 0.5
    return Job(
        make_model=make_model,
        layer_class=type(make_layer()),
        cut=_cut,
        loss=_mean,
        inputs={"x": x},
        first_input=x,
        target=torch.zeros(microbatches),
        hidden=hidden,
        microbatches=microbatches,
    )


def _cut(model: nn.Module, stage: int, stages: int) -> nn.Module:
    assert isinstance(model, Stack), "the job made it"
    each = len(model.layers) // stages
    assert each * stages == len(model.layers), "the layers divide into the stages"
    return StackStage(model, range(stage * each, (stage + 1) * each))


def _mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()
