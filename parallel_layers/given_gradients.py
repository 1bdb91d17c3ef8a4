"""Average of a list of gradients over the data-parallel ranks, for loops without ``run_train``."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.parallel_layers.gradient_average import average_tensors

_REMEDY = "Give zeros for a parameter that has no gradient on this rank."


def bucket_allreduce_gradients(grads_list: Sequence[torch.Tensor], reduce_over_ep_group: bool = False) -> None:
    """Replace each gradient by its mean over the data-parallel group, in place and in buckets.

    Collective over the group. All its ranks give gradients of the same shapes and dtypes in the same order. The last
    ones are sent first: a backward computes them first. ``run_train`` averages gradients already, unless it runs in
    ``no_sync()`` or with ``use_zero1_optimizer=True``.

    Args:
        grads_list: dense tensors. One that is given twice is averaged once.
        reduce_over_ep_group: ``False``; there is no expert parallelism.

    Raises:
        ValueError: for another argument and for sparse tensors.
        TypeError: for something other than a tensor.
        RuntimeError: for other shapes or dtypes on some ranks, before anything is changed.
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
        gradients = list({id(gradient): gradient for gradient in grads_list}.values())
        with failure_watch.reported():
            kinds = [(tuple(gradient.shape), gradient.dtype) for gradient in gradients]
            control = parallel_state.get_data_parallel_control_group()
            check_alike(kinds, len(gradients), control, "bucket_allreduce_gradients", "gradients", _REMEDY)
            average_tensors(gradients[::-1], group)


def check_alike(
    kinds: Sequence[object], count: int, control: ProcessGroup, caller: str, given: str, remedy: str
) -> None:
    """Raise ``RuntimeError`` on all ranks of ``control`` unless their ``kinds``, as text, are equal.

    Collective over ``control``. The message has the least and the largest ``count`` of tensors, and ends
    with ``remedy``.
    """
    numbers = (count, zlib.crc32(repr(kinds).encode()))
    both = torch.tensor([*numbers, *(-number for number in numbers)], device="cpu")
    dist.all_reduce(both, dist.ReduceOp.MAX, control)
    largest, negative = both.chunk(2)
    if not torch.equal(largest, -negative):
        raise RuntimeError(
            f"the data-parallel ranks give {caller} other {given}, {-int(negative[0])} to {int(largest[0])} of them, "
            f"and this rank {count}: each would be averaged with another's. {remedy}"
        )
