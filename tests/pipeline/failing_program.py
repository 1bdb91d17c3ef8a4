"""A training script whose second stage fails in the middle of a step; run under torchrun by test_failures."""

import sys
import time
from typing import Any

import torch

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.models import make, padded_batch

FAILING_CALL = 6


class Breaking:
    """Breaks a layer in its sixth call, after the first step of four microbatches."""

    def __init__(self, backward: bool) -> None:
        self.calls = 0
        self.backward = backward

    def __call__(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == FAILING_CALL:
            if self.backward:
                output.register_hook(self.fail)
            else:
                self.fail()

    def fail(self, *_: Any) -> None:
        print(f"fails at {time.time()}", file=sys.stderr, flush=True)
        raise ArithmeticError("the layer broke")


def main(where: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    wrapped = NxDPPModel(make("llama"), num_microbatches=4)
    if wrapped.rank == 1 and where != "input":
        dict(wrapped.local_named_modules())["model.layers.1"].register_forward_hook(Breaking(where == "backward"))
    for step in range(3):
        if where == "input" and step == 1 and wrapped.rank == 2:
            print(f"fails at {time.time()}", file=sys.stderr, flush=True)
            wrapped.run_train(**padded_batch(6))
        wrapped.run_train(**padded_batch(8))


main(sys.argv[1])
