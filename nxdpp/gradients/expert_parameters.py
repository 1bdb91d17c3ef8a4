"""Parameters of experts that expert-parallel ranks divide: whose gradients become one, and how.

Tokens of all replicas of an expert group reach the experts of each of its ranks. The layer of experts scales the
gradients of outputs, so that a gradient of experts is the mean over these replicas (``experts/tokens.py``). It is then
averaged over the ranks with the same experts. So a mean stays what it is if it is averaged again, as a program does
that accumulates steps. 4 data-parallel ranks, expert size 2::

    parameter      gradient on a rank                   averaged over
    of experts     mean over the tokens of 2 replicas   the 2 ranks with the same experts
    any other      of the tokens of 1 replica           all 4 ranks
"""

from functools import partial

import torch
from torch.distributed import ProcessGroup

from nxdpp.gradients.buckets import Combination
from nxdpp.ranks import parallel_state

# NeuronX Distributed's name.
_MARK = "expert_model_parallel"


def mark_experts(parameter: torch.Tensor) -> None:
    """Mark ``parameter``, this rank's experts along dimension 0, as divided over the expert group."""
    setattr(parameter, _MARK, True)


def is_of_experts(tensor: torch.Tensor) -> bool:
    """Return whether each rank of an expert group has experts of its own in ``tensor``."""
    return getattr(tensor, _MARK, False)


def over_replicas(of_experts: bool, mean: bool, group: ProcessGroup) -> tuple[ProcessGroup, Combination]:
    """Return the ranks over which gradients are summed, and how they become the mean over ``group``, or the sum.

    ``group`` are all replicas. Gradients ``of_experts`` are the mean over an expert group already.
    """
    if not of_experts:
        return group, Combination.over(group, mean)
    same, size = parallel_state.get_expert_data_parallel_group(), parallel_state.get_expert_model_parallel_size()
    return same, Combination.over(same, mean) if mean else Combination(
        1, before=[partial(torch.Tensor.mul_, other=size)]
    )
