"""``init`` and ``uninit``: the start and the end of ``torch.distributed`` for a program of nnScaler."""

import os

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state


def init() -> None:
    """Start ``torch.distributed`` on this rank's device, unless it is started; collective over all ranks.

    With CUDA the device is the one of ``LOCAL_RANK``, over NCCL; else gloo. Without torchrun's variables nothing is
    started. A call is optional: ``parallelize`` starts what is not.
    """
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized() and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        dist.init_process_group("nccl" if has_cuda else "gloo")


def uninit() -> None:
    """End all process groups; collective over all ranks."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
