"""Average of the gradients over the data-parallel ranks.

Gradients are packed into flat buckets with one all-reduce each, after the last microbatch. The method is that of
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (Li et al., 2020).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.parallel_layers.faults.board import board

_BUCKET_BYTES = 25 * 2**20

# One bucket is sent while the next one is packed; more would only take memory.
_BUCKETS_IN_FLIGHT = 2


@dataclass(frozen=True)
class _Reduction:
    """A bucket whose all-reduce is in flight."""

    gradients: list[torch.Tensor]
    flat: torch.Tensor
    work: dist.Work

    def finish(self) -> None:
        """Wait for the mean and copy it back into the gradients."""
        self.work.wait()
        if self.flat.data_ptr() == self.gradients[0].data_ptr():
            return
        parts = self.flat.split([gradient.numel() for gradient in self.gradients])
        for gradient, part in zip(self.gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def average_gradients(
    parameters: Iterable[nn.Parameter],
    group: ProcessGroup,
    control: ProcessGroup,
    notes: Sequence[int] = (),
    check: Callable[[list[int]], None] | None = None,
) -> None:
    """Replace each parameter's ``.grad`` by its mean over ``group``; collective over ``group``.

    ``control`` is a group over the same ranks that takes CPU tensors: hosts tell each other over it which gradients
    they have, without a wait for their devices.

    All ranks must give the same parameters in the same order. Parameters without ``requires_grad`` are skipped. A
    gradient that is ``None`` on some ranks counts as zeros there. One that is ``None`` on all ranks stays ``None``. A
    bucket holds gradients of one dtype and device, up to 25 MiB, or a single larger gradient. Sums are in the
    gradients' dtype.

    ``notes``, numbers of 32 bits, go along in the first message. ``check`` gets the largest of all ranks, and may raise
    before a gradient is sent.

    Raises ``ValueError`` for sparse gradients.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    size = dist.get_world_size(group)
    if size == 1 or not trained:
        return
    gradients = _gradients_of_any_rank(trained, control, notes, check)
    in_flight: deque[_Reduction] = deque()
    with torch.no_grad():
        for bucket in _buckets(gradients):
            if len(in_flight) == _BUCKETS_IN_FLIGHT:
                in_flight.popleft().finish()
            board.moved()
            in_flight.append(_start(bucket, group, size))
        while in_flight:
            in_flight.popleft().finish()
            board.moved()


def _gradients_of_any_rank(
    trained: list[nn.Parameter],
    control: ProcessGroup,
    notes: Sequence[int],
    check: Callable[[list[int]], None] | None,
) -> list[torch.Tensor]:
    """Gradients that any rank has, the same list on all ranks; missing ones become zeros on this rank."""
    present = [parameter.grad is not None for parameter in trained]
    flags = torch.tensor([*notes, *present], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=control)
    largest = flags.tolist()
    if check is not None:
        check(largest[: len(notes)])
    gradients = []
    for parameter, anywhere in zip(trained, largest[len(notes) :], strict=True):
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


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Buckets of one dtype and device with at most ``_BUCKET_BYTES``, the same on all ranks."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for alike in groups.values():
        bucket: list[torch.Tensor] = []
        filled = 0
        for gradient in alike:
            if bucket and filled + gradient.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(gradient)
            filled += gradient.nbytes
        yield bucket


def _start(bucket: list[torch.Tensor], group: ProcessGroup, size: int) -> _Reduction:
    alone = len(bucket) == 1 and bucket[0].is_contiguous()
    # The only gradient of a bucket is summed in place.
    flat = bucket[0].view(-1) if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
    # Divided before they are summed: the sum of many float16 gradients may overflow where their mean does not.
    flat.div_(size)
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return _Reduction(bucket, flat, work)
