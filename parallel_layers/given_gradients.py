"""Average of a list of gradients over the data-parallel ranks, for loops without ``run_train``."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.parallel_layers.gradient_average import average_tensors


def bucket_allreduce_gradients(grads_list: Sequence[torch.Tensor], reduce_over_ep_group: bool = False) -> None:
    """Replace each gradient by its mean over the data-parallel group, in place and in buckets.

    Collective over the group. All its ranks give gradients of the same shapes and dtypes in the same order. The last
    ones are sent first: a backward computes them first. ``run_train`` averages gradients already, unless it runs in
    ``no_sync()`` or with ``use_zero1_optimizer=True``.

    Args:
        grads_list: dense tensors.
        reduce_over_ep_group: ``False``; there is no expert parallelism.

    Raises ``ValueError`` for another argument and for sparse tensors, ``TypeError`` for something other than a tensor.
    """
    if reduce_over_ep_group:
        raise ValueError("reduce_over_ep_group=True is not supported: there is no expert parallelism.")
    for gradient in grads_list:
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(f"grads_list has {gradient!r:.80} in it: leave out parameters without a gradient.")
        if gradient.layout != torch.strided:
            raise ValueError("grads_list has a sparse gradient: build its embedding with sparse=False.")
    group = parallel_state.get_data_parallel_group()
    if dist.get_world_size(group) > 1:
        with failure_watch.reported():
            average_tensors(list(reversed(grads_list)), group)
