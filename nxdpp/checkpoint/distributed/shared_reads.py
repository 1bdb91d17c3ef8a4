"""Reads that all data-parallel replicas need: one replica does each, and sends the values to the others.

::

    replica 0   reads a, b ─┐ all reads    ┌ sends a, b ─▶ has a, b, c, d
    replica 1   reads c, d ─┴ succeeded ───┴ sends c, d ─▶ has a, b, c, d
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from nxdpp.devices.kinds import has_streams
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange, is_several
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import in_place, needs_host

T = TypeVar("T")

_PIECE_BYTES = 8 << 20


class SharedReads(Generic[T]):
    """The replica that does each read, of so many bytes in one order on all replicas; collective over all ranks.

    ``described`` tells all that is read, and where. Replicas with different texts read all of their own.
    """

    def __init__(self, exchange: Exchange, sizes: Mapping[T, int], described: str) -> None:
        self._replica, replicas = replica()
        self._owners: dict[T, int] = {}
        if exchange.ranks == 1:
            return
        digests = exchange.gather(zlib.crc32(described.encode()))
        group = dist.get_process_group_ranks(parallel_state.get_replica_group())
        if replicas > 1 and len({digests[rank] for rank in group}) == 1:
            self._owners = owners(sizes, replicas)

    def is_here(self, read: T) -> bool:
        """Return whether this rank does ``read``."""
        return self._owners.get(read, self._replica) == self._replica

    @torch.no_grad()
    def send(self, values: Mapping[T, Sequence[torch.Tensor]]) -> None:
        """Send the values of each read, in place, from the replica that has done it; collective over the replicas."""
        for read, owner in self._owners.items():
            for tensor in values[read]:
                board.moved()
                broadcast(tensor.detach(), owner)


def replica() -> tuple[int, int]:
    """This rank's place among the data-parallel replicas, and their number."""
    if not is_several():
        return 0, 1
    return parallel_state.get_replica_rank(), parallel_state.get_replica_size()


def owners(sizes: Mapping[T, int], replicas: int) -> dict[T, int]:
    """The replica of each of ``sizes``: neighbours share one, and all replicas get about as many bytes."""
    whole, before, found = sum(sizes.values()), 0, {}
    for each, size in sizes.items():
        found[each] = min(replicas - 1, (2 * before + size) * replicas // max(1, 2 * whole))
        before += size
    return found


def broadcast(values: torch.Tensor, source: int) -> None:
    """Broadcast ``values`` in pieces, in place; values that are not contiguous through a copy of a piece."""
    group = parallel_state.get_replica_group()
    if needs_host(values, group):
        # A copy of all of it: a piece of a lazy device is a graph of its own.
        in_place(values, group, lambda host: broadcast(host, source))
        return
    # A backend only of devices, such as NCCL, takes no memory of the host.
    takes_host = dist.get_backend(group) == dist.Backend.GLOO
    device = values.device if takes_host or has_streams(values.device.type) else parallel_state.local_device()
    for piece in _pieces(values):
        sent = piece.contiguous().to(device)
        with Wait("parts of a file", group):
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=source)
        if sent is not piece:
            piece.copy_(sent)


def _pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of ``values`` of ``_PIECE_BYTES`` or less, or of one row."""
    if values.numel() == 0:
        return
    if values.is_contiguous():
        yield from values.view(-1).split(max(1, _PIECE_BYTES // values.element_size()))
        return
    row = values[0].numel() * values.element_size()
    yield from values.split(max(1, _PIECE_BYTES // row))
