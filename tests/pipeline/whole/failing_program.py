"""A training script whose second stage fails in the middle of a step; run by test_failures."""

import sys

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.whole.breaking import Breaking, say_that_it_fails
from tests.support.models import make, padded_batch

# In the second step of four microbatches.
FAILING_CALL = 6


def main(where: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    wrapped = NxDPPModel(make("llama"), num_microbatches=4)
    if wrapped.rank == 1 and where != "input":
        layer = dict(wrapped.local_named_modules())["model.layers.1"]
        layer.register_forward_hook(Breaking(FAILING_CALL, where == "backward"))
    for step in range(3):
        if where == "input" and step == 1 and wrapped.rank == 2:
            say_that_it_fails()
            wrapped.run_train(**padded_batch(6))
        wrapped.run_train(**padded_batch(8))


main(sys.argv[1])
