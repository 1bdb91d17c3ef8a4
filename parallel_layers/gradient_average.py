"""The average of the gradients over the ranks that train on different data.

Gradients are packed into flat buckets, one all-reduce each, as in "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (Li et al., 2020), here all after the last microbatch.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

BUCKET_BYTES = 25 * 2**20

_BUCKETS_UNDER_WAY = 2
"""One on the wire while the next is packed; more would only take memory."""


@dataclass(frozen=True)
class _Reduction:
    """A bucket under way."""

    gradients: list[torch.Tensor]
    flat: torch.Tensor
    work: dist.Work

    def finish(self, size: int) -> None:
        """Waits for the sum and puts its share of one rank back into the gradients."""
        self.work.wait()
        self.flat.div_(size)
        if self.flat.data_ptr() == self.gradients[0].data_ptr():
            return
        parts = self.flat.split([gradient.numel() for gradient in self.gradients])
        for gradient, part in zip(self.gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def average_gradients(
    parameters: Iterable[nn.Parameter], group: ProcessGroup, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replaces each parameter's ``.grad`` by its mean over ``group``; collective over ``group``.

    All ranks give the same parameters in the same order; those without ``requires_grad`` are passed over.
    A gradient that is ``None`` on this rank and not on another counts as zeros and becomes the mean; one
    that is ``None`` on all stays so. A bucket holds gradients of one dtype and device, up to
    ``bucket_bytes``, or a single larger one; sums are made in the gradients' dtype.

    Raises ``ValueError`` for a ``bucket_bytes`` below 1 and for sparse gradients.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    size = dist.get_world_size(group)
    if size == 1 or not trained:
        return
    gradients = _gradients_of_any_rank(trained, group)
    under_way: deque[_Reduction] = deque()
    with torch.no_grad():
        for bucket in _buckets(gradients, bucket_bytes):
            if len(under_way) == _BUCKETS_UNDER_WAY:
                under_way.popleft().finish(size)
            under_way.append(_start(bucket, group))
        while under_way:
            under_way.popleft().finish(size)


def _gradients_of_any_rank(trained: list[nn.Parameter], group: ProcessGroup) -> list[torch.Tensor]:
    """The gradients that some rank has, the same ones on all ranks, with zeros where this one has none."""
    present = [parameter.grad is not None for parameter in trained]
    flags = torch.tensor(present, dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, anywhere in zip(trained, flags.tolist(), strict=True):
        if not anywhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.layout != torch.strided:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be "
                "averaged in buckets: build its embedding with sparse=False"
            )
        gradients.append(parameter.grad)
    return gradients


def _buckets(gradients: list[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype and device in runs of at most ``bucket_bytes``, the same on all ranks."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for alike in kinds.values():
        bucket: list[torch.Tensor] = []
        filled = 0
        for gradient in alike:
            if bucket and filled + gradient.nbytes > bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(gradient)
            filled += gradient.nbytes
        yield bucket


def _start(bucket: list[torch.Tensor], group: ProcessGroup) -> _Reduction:
    alone = len(bucket) == 1 and bucket[0].is_contiguous()
    # A gradient with a bucket to itself is summed where it lies.
    flat = bucket[0].view(-1) if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return _Reduction(bucket, flat, work)
