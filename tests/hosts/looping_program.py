"""Program of ``test_two_hosts`` whose ranks exchange a value again and again until they are ended."""

import ctypes
import os
import time

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # A fork of torchrun would get SIGINT at torchrun's end. The program of a user does not.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    group = parallel_state.get_pipeline_model_parallel_group()
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    while True:
        dist.all_reduce(torch.ones(1), group=group)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
