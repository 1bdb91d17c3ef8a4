"""Mean loss of a step over all microbatches and data-parallel replicas."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.host_wire import in_place


def mean_loss(losses: Sequence[torch.Tensor], source: int, device: torch.device) -> torch.Tensor:
    """Mean loss over all microbatches and data-parallel replicas, on every rank; all ranks must call this.

    Args:
        losses: the loss of each microbatch, on the rank of the last stage; ignored on others.
        source: the rank of the pipeline that has them.
        device: device of the result.

    Returns:
        A float32 tensor of shape ().
    """
    if parallel_state.get_pipeline_model_parallel_rank() == source:
        loss = torch.stack(list(losses)).mean().float()
        replicas = parallel_state.get_data_parallel_group()
        in_place(loss, replicas, lambda message: dist.all_reduce(message, group=replicas))
        loss /= parallel_state.get_data_parallel_size()
    else:
        loss = torch.empty((), dtype=torch.float32, device=device)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    in_place(loss, pipeline, lambda message: dist.broadcast(message, group=pipeline, group_src=source))
    return loss
