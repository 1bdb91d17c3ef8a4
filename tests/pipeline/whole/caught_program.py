"""A training script that catches the errors of its steps; run by test_caught_failures.

Usage: caught_program.py WHERE RANK, on 2 ranks, where RANK fails in step 2: in a ``layer``, for its ``inputs``, and
``leaves`` then, or is interrupted in a layer and makes a ``restart`` of its own.
"""

import sys

import torch
from torch import nn

from nxdpp import parallel_state
from tests.pipeline.runtime.scheduled_models import Chain, make, rows, wrap
from tests.pipeline.whole.breaking import say_that_it_fails

STEPS = 5
FAILING = 2


class Breaking:
    """A forward hook that fails in the second microbatch of step ``FAILING``."""

    def __init__(self, error: type[BaseException]) -> None:
        self.calls = 0
        self.error = error

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.calls += 1
        if self.calls == 4 * (FAILING - 1) + 2:
            say_that_it_fails()
            raise self.error("the layer broke")


def main(where: str, failing_rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = wrap(make(Chain, 2), 4)
    rank = torch.distributed.get_rank()
    if rank == failing_rank and where in ("layer", "restart"):
        layer = dict(wrapped.local_named_modules())[wrapped.stage_layers[0]]
        layer.register_forward_hook(Breaking(ArithmeticError if where == "layer" else KeyboardInterrupt))
    for step in range(1, STEPS + 1):
        breaks = rank == failing_rank and where in ("inputs", "leaves") and step == FAILING
        if breaks:
            say_that_it_fails()
        try:
            wrapped.run_train(x=rows(6 if breaks else 8))
            print(f"rank {rank} has run step {step}", flush=True)
        except Exception as error:
            print(f"rank {rank} caught in step {step}: {error!r}", flush=True)
            if where == "leaves":
                break
        except KeyboardInterrupt:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    print(f"rank {rank} is done", flush=True)


main(sys.argv[1], int(sys.argv[2]))
