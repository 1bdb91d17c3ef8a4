"""A training script with two stages per rank, one of which fails in the second step."""

import sys

from nxdpp import parallel_state
from tests.pipeline.runtime.scheduled_models import Chain, make, rows, wrap
from tests.pipeline.whole.breaking import Breaking

MICROBATCHES = 4
FAILING_CALL = MICROBATCHES + 2


def main(schedule: str, where: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = wrap(make(Chain, 4), MICROBATCHES, schedule=schedule)
    # Rank 1's second stage: the last one in a loop, the third in a V.
    if wrapped.rank == 1:
        name = wrapped.stage_layers[1]
        dict(wrapped.local_named_modules())[name].register_forward_hook(Breaking(FAILING_CALL, where == "backward"))
    for _ in range(3):
        wrapped.run_train(x=rows(MICROBATCHES))


main(*sys.argv[1:])
