"""Program of ``test_hosts`` whose ranks exchange values again and again until they are ended.

Run as ``looping_program.py [RANKS OF A PIPELINE]``; by default all ranks are one pipeline.
"""

import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # A fork of torchrun would get SIGINT at torchrun's end. The program of a user does not.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    ranks = int(sys.argv[1]) if sys.argv[1:] else int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks, order=("data", "pipeline", "tensor"))
    groups = [parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()]
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    while True:
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
