"""Numbers that each rank has, on all ranks."""

import torch
import torch.distributed as dist

from nxdpp import parallel_state


def numbers_of_all_ranks(numbers: list[float]) -> torch.Tensor:
    """The numbers of each rank, float64 of shape ``(ranks, numbers)``; collective over all ranks."""
    # In host memory for gloo, which takes no tensor of a device.
    own = torch.tensor(numbers, dtype=torch.float64, device=parallel_state.get_device_mesh().device_type)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return torch.stack(every).cpu()
