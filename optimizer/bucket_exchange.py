"""Messages of an optimizer's step over the data-parallel replicas: reduced buckets, and their parameters."""

from collections import deque
from collections.abc import Sequence

import torch

from nxdpp.optimizer.sharded_bucket import ShardedBucket
from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.gradient_average import Hook, Work

# One bucket is sent while the next one is packed.
_IN_FLIGHT = 2


def reduce_buckets(buckets: Sequence[ShardedBucket], before: Sequence[Hook] = ()) -> None:
    """Average or sum the gradients of the buckets, each rank its own part; collective over the replicas."""
    reductions: deque[Work | None] = deque()
    for bucket in buckets:
        _wait(reductions, _IN_FLIGHT - 1)
        reductions.append(bucket.start_reduction(before))
    _wait(reductions)


def gather_buckets(buckets: Sequence[ShardedBucket]) -> None:
    """Free the gradients of the buckets and give all replicas their values; collective over the replicas."""
    gathered: deque[tuple[ShardedBucket, torch.Tensor]] = deque()
    works: deque[Work | None] = deque()
    for bucket in buckets:
        bucket.drop_gradients()
        if len(gathered) == _IN_FLIGHT:
            _take(gathered, works)
        flat, work = bucket.start_gathering()
        gathered.append((bucket, flat))
        works.append(work)
    while gathered:
        _take(gathered, works)


def _wait(works: deque[Work | None], leave: int = 0) -> None:
    while len(works) > leave:
        work = works.popleft()
        if work is not None:
            work.wait()
        board.moved()


def _take(gathered: deque[tuple[ShardedBucket, torch.Tensor]], works: deque[Work | None]) -> None:
    _wait(works, len(works) - 1)
    bucket, flat = gathered.popleft()
    bucket.take(flat)
