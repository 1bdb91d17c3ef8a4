"""Mean loss of a step over all microbatches and data-parallel replicas."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nxdpp.ranks import parallel_state
from nxdpp.ranks.host_wire import from_wire, on_wire, wire_device


def mean_loss(losses: Sequence[torch.Tensor], source: int, device: torch.device) -> torch.Tensor:
    """Mean loss over all microbatches and data-parallel replicas, on every rank; all ranks must call this.

    Args:
        losses: the loss of each microbatch, on the rank of the last stage; ignored on others.
        source: the rank of the pipeline that has them.
        device: device of the result.

    Returns:
        A float32 tensor of shape ().
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if parallel_state.get_pipeline_model_parallel_rank() == source:
        replicas = parallel_state.get_data_parallel_group()
        loss = on_wire(torch.stack(list(losses)).mean().float(), replicas)
        dist.all_reduce(loss, group=replicas)
        loss /= parallel_state.get_data_parallel_size()
    else:
        loss = torch.empty((), dtype=torch.float32, device=wire_device(device, pipeline))
    dist.broadcast(loss, group=pipeline, group_src=source)
    return from_wire(loss, device)
