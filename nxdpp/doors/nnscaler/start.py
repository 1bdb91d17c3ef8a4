"""``init`` and ``uninit``: the start and the end of ``torch.distributed`` for a program of nnScaler."""

import os

import torch.distributed as dist

from nxdpp.devices.kinds import has_streams, kind_of
from nxdpp.ranks import parallel_state
from nxdpp.ranks.device_choice import start_device
from nxdpp.ranks.launch import choose_device


def init() -> None:
    """Start ``torch.distributed`` on this rank's device, unless it is started; collective over all ranks.

    The device is this rank's accelerator, over the backend of its type (NCCL for CUDA), and becomes the current one;
    without an accelerator it is the CPU, over gloo. Without torchrun's variables nothing is started. A call is
    optional: ``parallelize`` starts what is not. Raises ``RuntimeError`` for an accelerator that cannot be used.
    """
    if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return
    device = choose_device(None)
    if has_streams(device.type):
        start_device(device)
    if not dist.is_initialized():
        dist.init_process_group(kind_of(device.type).backend)


def uninit() -> None:
    """End all process groups; collective over all ranks."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
