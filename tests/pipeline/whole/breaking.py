"""A layer that fails in the middle of a step."""

import sys
import time
from typing import Any

import torch


class Breaking:
    """A forward hook that fails in the forward or the backward of the ``failing_call``-th microbatch."""

    def __init__(self, failing_call: int, backward: bool) -> None:
        self.calls = 0
        self.failing_call = failing_call
        self.backward = backward

    def __call__(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == self.failing_call:
            if self.backward:
                output.register_hook(self.fail)
            else:
                self.fail()

    def fail(self, *_: Any) -> None:
        say_that_it_fails()
        raise ArithmeticError("the layer broke")


def say_that_it_fails() -> None:
    """Print the time of the failure. The test measures how long the other ranks go on."""
    print(f"fails at {time.time()}", file=sys.stderr, flush=True)
