"""A training script in which ranks make different collective calls; run by test_other_calls.

Usage: other_call_program.py CASE FOLDER, on 4 ranks: two replicas of two stages.
"""

import sys
import time

import torch.distributed as dist

from nxdpp import NxDPPModel, parallel_state, save_pretrained
from tests.support.models import make, padded_batch

STEPS = 2


def main(case: str, folder: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    rule = "tokens" if case == "evaluate_a_replica" else "microbatch"
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=2, loss_normalization=rule)
    for _ in range(STEPS):
        wrapped.run_train(**padded_batch(4))
    if dist.get_rank() == 0:
        print(f"fails at {time.time()}", flush=True)
    if case == "save" and dist.get_rank() == 0:
        save_pretrained(wrapped, folder)
    elif case == "evaluate_a_replica" and parallel_state.get_data_parallel_rank() == 0:
        wrapped.run_eval(**padded_batch(4))
    elif case == "models":
        # A copy of the model, which takes its turn before it on some ranks.
        copy = NxDPPModel(make("llama", layers=2), num_microbatches=2)
        (copy if parallel_state.get_pipeline_model_parallel_rank() == 0 else wrapped).run_train(**padded_batch(4))
    wrapped.run_train(**padded_batch(4))
    wrapped.run_train(**padded_batch(4))


main(sys.argv[1], sys.argv[2])
