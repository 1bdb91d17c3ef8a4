"""Layers that sleep, that do next to nothing, and that keep much for their backward."""

import ctypes
import time
from typing import Any

import torch
from torch import nn


class SleepingLayer(nn.Module):
    """Takes the processor for next to nothing, and time for ``seconds``: 4 ranks on 2 cores really overlap.

    The forward sleeps once; so does the gradient of the input, and so does that of the weight, each in a node of the
    autograd graph of its own: who computes only one of the two sleeps only once.
    """

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` times the weight."""
        time.sleep(self.seconds)
        same_hidden, same_weight = (sleep_in_backward(tensor, self.seconds) for tensor in (hidden, self.weight))
        return same_hidden * same_weight


def wake_up_in_time() -> None:
    """Let this thread's sleeps end when they should: by default the kernel may add 50 microseconds to each."""
    set_timer_slack, nanoseconds = 29, 1
    ctypes.CDLL(None).prctl(set_timer_slack, nanoseconds)


def sleep_in_backward(tensor: torch.Tensor, seconds: float) -> torch.Tensor:
    """The same values; its gradient takes so many seconds."""
    same: torch.Tensor = _SleepInBackward.apply(tensor, seconds)  # type: ignore[no-untyped-call]
    return same


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        """The same values."""
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same gradient, later."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class ScalingLayer(nn.Module):
    """One multiplication."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` times the weight."""
        return hidden * self.weight


class WideLayer(nn.Module):
    """Keeps nine times its input for its backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        changed: torch.Tensor = self.down(nn.functional.gelu(self.up(hidden)))
        return hidden + changed
