"""Program of ``test_two_hosts`` whose ranks exchange a value again and again until they are ended."""

import os
import time

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state


def main() -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    group = parallel_state.get_pipeline_model_parallel_group()
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    while True:
        dist.all_reduce(torch.ones(1), group=group)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
