"""Stacks of layers that sleep, compute little, or keep much for their backward; and their cut by hand."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.comparison.job import Job


class SleepingLayer(nn.Module):
    """Sleeps for ``seconds`` and computes little, so that 4 ranks on 2 cores overlap.

    The forward, the input-gradient and the weight-gradient each sleep once. Each gradient has its own autograd node:
    a backward that computes only one of the two sleeps once.
    """

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` (B, T, H) times the weight."""
        time.sleep(self.seconds)
        same_hidden: torch.Tensor = _SleepInBackward.apply(hidden, self.seconds)  # type: ignore[no-untyped-call]
        same_weight: torch.Tensor = _SleepInBackward.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return same_hidden * same_weight


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        """The same values."""
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same gradient, after the sleep."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class ScalingLayer(nn.Module):
    """One multiplication."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` (B, T, H) times the weight."""
        return hidden * self.weight


class WideLayer(nn.Module):
    """A residual block that keeps nine times its input for its backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` (B, T, H) plus its change."""
        changed: torch.Tensor = self.down(nn.functional.gelu(self.up(hidden)))
        return hidden + changed


class Stack(nn.Module):
    """Layers after ``start``, which scales the input: so the first stage has an input-gradient like the others."""

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.rand(width) + 0.5)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss: the mean of the last hidden states."""
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
        """Hidden states (B, T, H) after this stage."""
        if self.start is not None:
            hidden = hidden * self.start
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def stack_job(make_layer: Callable[[], nn.Module], layers: int, hidden: tuple[int, ...], microbatches: int) -> Job:
    """A job of ``layers`` layers; the hidden states of one microbatch have the shape ``hidden``."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return Stack([make_layer() for _ in range(layers)], hidden[-1])

    torch.manual_seed(1)
    x = torch.rand(hidden[0] * microbatches, *hidden[1:]) + 0.5
    return Job(
        make_model=make_model,
        layer_class=type(make_layer()),
        cut=_cut,
        loss=lambda output, target: output.mean(),
        inputs={"x": x},
        first_input=x,
        target=torch.zeros(microbatches),
        hidden=hidden,
        microbatches=microbatches,
    )


def end_sleeps_on_time() -> None:
    """Set this thread's timer slack to 1 ns; by default the kernel may add 50 µs to each sleep."""
    set_timer_slack, nanoseconds = 29, 1
    ctypes.CDLL(None).prctl(set_timer_slack, nanoseconds)


def _cut(model: nn.Module, stage: int, stages: int) -> nn.Module:
    assert isinstance(model, Stack), "stack_job makes a Stack"
    each = len(model.layers) // stages
    assert each * stages == len(model.layers), "the layers divide into the stages"
    return StackStage(model, range(stage * each, (stage + 1) * each))
