"""A training script with two stages a rank, one of which fails in the second step; run under torchrun."""

import sys
import time
from typing import Any

import torch

from nxdpp import parallel_state
from tests.pipeline.scheduled_models import Chain, make, rows, wrap

MICROBATCHES = 4
FAILING_CALL = MICROBATCHES + 2


class Breaking:
    """Breaks a layer, in its forward or its backward, at the second microbatch of the second step."""

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


def main(schedule: str, where: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = wrap(make(Chain, 4), MICROBATCHES, schedule=schedule)
    # Rank 1's second stage: the last one in a loop, the third in a V.
    if wrapped.rank == 1:
        name = wrapped.stage_layers[1]
        dict(wrapped.local_named_modules())[name].register_forward_hook(Breaking(where == "backward"))
    for _ in range(3):
        wrapped.run_train(x=rows(MICROBATCHES))


main(*sys.argv[1:])
