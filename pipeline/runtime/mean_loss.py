"""The mean loss on every rank (the guide's ``broadcast_and_average_loss``)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nxdpp.parallel_layers import parallel_state


def mean_everywhere(losses: Sequence[torch.Tensor], source: int, device: torch.device) -> torch.Tensor:
    """The mean of all microbatches' losses and of all data-parallel replicas, float32, on every rank; collective.

    ``losses`` are those of this rank, which ``source``, a rank of the pipeline, alone has.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if parallel_state.get_pipeline_model_parallel_rank() == source:
        loss = torch.stack(list(losses)).mean().float()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        loss /= parallel_state.get_data_parallel_size()
    else:
        loss = torch.empty((), dtype=torch.float32, device=device)
    dist.broadcast(loss, group=pipeline, group_src=source)
    return loss
