"""Mean loss of a step over all microbatches and data-parallel replicas."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, on_wire, wire_device

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def mean_loss(
    losses: Sequence[torch.Tensor], source: int, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Mean loss over all microbatches and data-parallel replicas, on every rank; all ranks must call this.

    The pipeline's rank ``source`` gives the loss of each microbatch; ``losses`` of others are ignored. Without
    ``dtype``, the dtype of the losses, this rank waits for the device and reads it. Returns a tensor of shape () on
    ``device``.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if parallel_state.get_pipeline_model_parallel_rank() == source:
        mean = torch.stack(list(losses)).mean()
        dtype = mean.dtype
        replicas = parallel_state.get_data_parallel_group()
        loss = on_wire(mean, replicas).double()
        # float64 has the values of all dtypes.
        message = torch.stack([loss, torch.full_like(loss, _DTYPES.index(dtype))])
        with Wait("mean loss", replicas):
            dist.all_reduce(message, group=replicas)
        message /= parallel_state.get_data_parallel_size()
    else:
        message = torch.empty(2, dtype=torch.float64, device=wire_device(device, pipeline))
    with Wait("mean loss", pipeline):
        dist.broadcast(message, group=pipeline, group_src=source)
    return from_wire(message[0].to(dtype or _DTYPES[int(message[1])]), device)
