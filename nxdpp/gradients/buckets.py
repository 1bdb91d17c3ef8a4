"""Flat buckets of tensors: cut, packed, sent two at a time, and copied back.

::

    tensors ─ cut ─▶ bucket 0 ─ pack, hooks, division ─▶ collective ─────────────▶ hooks, copy back
                     bucket 1 ────────────────────────── pack, hooks, division ─▶ collective ─▶ ...

The method comes from "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (Li et al., 2020). The
average of gradients and the sharded optimizer send their tensors this way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.devices.kinds import device_of
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import HostWork, begin_on_host

BUCKET_BYTES = 25 * 2**20

# One bucket is sent while the next one is packed; more would only take memory.
_IN_FLIGHT = 2

T = TypeVar("T", bound=torch.Tensor)

Memory = Callable[[torch.device, int], torch.Tensor]
"""A function of a device and a number of bytes that returns uint8 memory."""

CollectiveWork = dist.Work | HostWork

Hook = Callable[[torch.Tensor], object]
"""A function that may change a flat bucket, of shape (elements,), in place."""


@dataclass(frozen=True)
class Combination:
    """Sum (``divisor`` 1) or mean over ranks: ``before`` on each rank's gradients, division, sum, ``after``."""

    divisor: int
    before: Sequence[Hook] = ()
    after: Sequence[Hook] = ()

    @staticmethod
    def over(group: ProcessGroup, mean: bool) -> "Combination":
        """The mean over ``group``, or the sum."""
        return Combination(dist.get_world_size(group) if mean else 1)

    def pack(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Copy ``tensors`` to their ``places`` in ``flat``, and prepare ``flat`` for the sum."""
        divides_at_once = self.divisor > 1 and not self.before
        for tensor, place in zip(tensors, places, strict=True):
            if divides_at_once and tensor.dtype == place.dtype:
                torch.div(tensor.reshape(-1), self.divisor, out=place)
            else:
                place.copy_(tensor.reshape(-1))
                if divides_at_once:
                    place.div_(self.divisor)
        if not divides_at_once:
            self.prepare(flat)

    def prepare(self, flat: torch.Tensor) -> None:
        """Run the hooks and the division of ``flat`` before the sum."""
        for hook in self.before:
            hook(flat)
        if self.divisor > 1:
            # Divided before they are summed: the sum of many float16 gradients may overflow where their mean does not.
            flat.div_(self.divisor)


@dataclass(frozen=True, eq=False)
class SentBucket:
    """A bucket whose collective has begun; ``work`` is ``None`` for one rank.

    ``flat`` gets the result, in host memory where the group cannot send from the device. ``after`` runs on the result,
    and ``take`` copies it to where it belongs. ``copied_bytes`` is 0 for a single tensor that is sent from its own
    memory.
    """

    flat: torch.Tensor
    work: CollectiveWork | None
    wait: Wait
    take: Callable[[torch.Tensor], object]
    after: Sequence[Hook] = ()
    copied_bytes: int = 0

    def is_completed(self) -> bool:
        """Return whether ``finish`` would not block."""
        return self.work is None or self.work.is_completed()

    def wait_begun(self) -> None:
        """Block until the message is in flight: a later one over the same group then follows it."""
        if isinstance(self.work, HostWork):
            self.work.wait_begun()

    def finish(self) -> None:
        """Wait for the result, and copy it to where it belongs."""
        if self.work is not None:
            with self.wait:
                self.work.wait()
        for hook in self.after:
            hook(self.flat)
        self.take(self.flat)


def cut(
    tensors: Iterable[T], limit: int | None = None, kind_of: Callable[[T], object] = lambda _: None
) -> Iterator[list[T]]:
    """Give buckets of one dtype, device and ``kind_of`` with at most ``limit`` bytes, the first full one first.

    ``limit`` is 25 MiB by default. A larger tensor has a bucket of its own. Buckets are the same on all ranks that give
    tensors of the same shapes in the same order.
    """
    limit = BUCKET_BYTES if limit is None else limit
    filling: dict[tuple[object, ...], list[T]] = {}
    filled: dict[tuple[object, ...], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device, kind_of(tensor))
        bucket = filling.setdefault(kind, [])
        if bucket and filled[kind] + tensor.nbytes > limit:
            yield bucket
            filling[kind] = bucket = []
        filled[kind] = tensor.nbytes + (filled[kind] if bucket else 0)
        bucket.append(tensor)
    yield from filling.values()


def places_in(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The places of ``tensors`` in ``flat``, one after the other; ``flat`` may have padding behind them."""
    counts = [tensor.numel() for tensor in tensors]
    places: Sequence[torch.Tensor] = flat[: sum(counts)].split(counts)
    return places


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the values of ``flat`` to ``tensors``, which may be on another device than ``flat``."""
    for tensor, place in zip(tensors, places_in(flat, tensors), strict=True):
        if flat.device == tensor.device:
            tensor.copy_(place.view_as(tensor))
        else:
            device_of(tensor.device).fill(tensor, place.view_as(tensor))


def begin(
    tensors: Sequence[torch.Tensor],
    is_through_host: bool,
    collective: Callable[[Sequence[torch.Tensor]], dist.Work | None],
) -> CollectiveWork | None:
    """Begin ``collective`` of ``tensors``, or of their copies once these are in host memory."""
    return begin_on_host(tensors, collective) if is_through_host else collective(tensors)


def send_all(sends: Iterable[Callable[[], SentBucket]]) -> None:
    """Send buckets, each by a call of ``sends``, two at a time; collective over the ranks of the buckets."""
    in_flight: deque[SentBucket] = deque()
    for send in sends:
        if len(in_flight) == _IN_FLIGHT:
            in_flight.popleft().finish()
        in_flight.append(send())
        board.moved()
    while in_flight:
        in_flight.popleft().finish()
        board.moved()


class FlatMemory:
    """Memory for flat copies of gradients, kept from step to step: as many pieces as there were copies at one time.

    On the CPU new memory of that size comes from the kernel, page by page, which takes longer than the copy.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, device: torch.device, count: int) -> torch.Tensor:
        """Return ``count`` bytes on ``device``, uint8: the smallest free memory that has them, or new memory."""
        fitting = [each for each in self._free if each.numel() >= count and each.device == device]
        if not fitting:
            # Other buckets than before: the new piece takes the place of one that is too small.
            self._free = self._free[1:]
            return torch.empty(count, dtype=torch.uint8, device=device)
        chosen = min(fitting, key=torch.Tensor.numel)
        self._free = [each for each in self._free if each is not chosen]
        return chosen[:count]

    def give_back(self, copy: torch.Tensor) -> None:
        """Free the memory of ``copy``, which was made in what ``take`` returned."""
        storage = copy.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=copy.device).set_(storage))
