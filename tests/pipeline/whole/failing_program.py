"""A training script of which rank 1 fails in the middle of its second step; run by test_failures.

Usage: failing_program.py RANKS SCHEDULE WHERE, where rank 1 fails in its last stage's ``forward`` or ``backward``, or
for its ``input``.
"""

import sys

from nxdpp import parallel_state
from tests.pipeline.runtime.scheduled_models import Chain, make, rows, wrap
from tests.pipeline.whole.breaking import Breaking, say_that_it_fails

MICROBATCHES = 4
FAILING_CALL = MICROBATCHES + 2


def main(ranks: int, schedule: str, where: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    wrapped = wrap(make(Chain, 4), MICROBATCHES, schedule=schedule)
    # The third stage in a V.
    if wrapped.rank == 1 and where != "input":
        name = wrapped.stage_layers[-1]
        dict(wrapped.local_named_modules())[name].register_forward_hook(Breaking(FAILING_CALL, where == "backward"))
    for step in range(3):
        breaks = where == "input" and step == 1 and wrapped.rank == 1
        if breaks:
            say_that_it_fails()
        wrapped.run_train(x=rows(6 if breaks else 2 * MICROBATCHES))


main(int(sys.argv[1]), *sys.argv[2:])
