"""Sum or mean of the gradients of given parameters over a group, with functions of each flat bucket."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.parallel_layers import failure_watch
from nxdpp.parallel_layers.given_gradients import check_alike
from nxdpp.parallel_layers.gradient_average import (
    Combination,
    Hook,
    buckets,
    combine_buckets,
    gradients_of_any_rank,
    largest_flags,
)
from nxdpp.parallel_layers.gradient_dtype import gradient_dtype

_REMEDY = "Give the same parameters in the same order, with the same requires_grad, on every rank."


def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    group: ProcessGroup,
    control: ProcessGroup,
    *,
    mean: bool = True,
    before: Sequence[Hook] = (),
    after: Sequence[Hook] = (),
    bucket_bytes: int = 25 * 2**20,
) -> None:
    """Replace each parameter's ``.grad`` by its mean over ``group``, or its sum, in place and in buckets.

    Collective over ``group``. Parameters without ``requires_grad`` are skipped; one that is given twice counts once. A
    gradient that is ``None`` on some ranks counts as zeros there. One that is ``None`` on all ranks stays ``None``.

    Args:
        parameters: the same ones in the same order on all ranks.
        group: the ranks whose gradients become one.
        control: a group over the same ranks that takes CPU tensors.
        mean: ``False`` for the sum.
        before: functions of a flat bucket of this rank's own gradients, of shape (elements,), which change it in place.
            They run in their order, before the division of a mean.
        after: functions of the flat bucket of the result, likewise. The result of a function is not used.
        bucket_bytes: largest size of a bucket, or of a single larger gradient's.

    Raises:
        ValueError: for sparse gradients, and for ``bucket_bytes`` below 1.
        RuntimeError: for other parameters on some ranks, or another ``mean``, before anything is changed.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}: the default is {25 * 2**20}.")
    trained = list({id(each): each for each in parameters if each.requires_grad}.values())
    if dist.get_world_size(group) == 1 and not before and not after:
        return
    with failure_watch.reported():
        kinds = [mean, bucket_bytes, *((tuple(each.shape), gradient_dtype(each)) for each in trained)]
        check_alike(kinds, len(trained), control, "reduce_gradients", "parameters", _REMEDY)
        if not trained:
            return
        gradients = gradients_of_any_rank(trained, largest_flags(trained, control))
        combination = Combination(dist.get_world_size(group) if mean else 1, before, after)
        combine_buckets(buckets(gradients, bucket_bytes), group, combination)
