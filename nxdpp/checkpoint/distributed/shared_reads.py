"""Tensors that all data-parallel replicas need: each is read by one replica, and sent to the others.

::

    replica 0   reads a, c ─┐ all reads    ┌ sends a, c ─▶ has a, b, c
    replica 1   reads b ────┴ succeeded ───┴ sends b ────▶ has a, b, c
"""

import zlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from nxdpp.checkpoint.distributed import ranks
from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.tensor_blocks import TensorBlocks, owners
from nxdpp.devices.kinds import device_of
from nxdpp.ranks import parallel_state
from nxdpp.ranks.host_wire import needs_host

_PIECE_BYTES = 8 << 20


class SharedReads:
    """The tensors of this rank that other replicas need too, and the replica that reads each.

    Collective over all ranks. Replicas that need different rectangles read all of their own.
    """

    def __init__(self, tensors: Mapping[str, TensorBlocks], exchange: Exchange) -> None:
        self._replica, replicas = ranks.replica()
        self._tensors: dict[str, TensorBlocks] = {}
        self._owners: dict[str, int] = {}
        if exchange.ranks == 1:
            return
        digests = exchange.all_of(_digest(tensors))
        group = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
        if replicas > 1 and len({digests[rank] for rank in group}) == 1:
            self._tensors = dict(sorted(tensors.items()))
            self._owners = owners(self._tensors, replicas)

    def is_read_here(self, name: str) -> bool:
        """Return whether this rank reads the tensor ``name``."""
        return self._owners.get(name, self._replica) == self._replica

    @torch.no_grad()
    def send(self) -> None:
        """Send each tensor from the replica that has read it; collective over the replicas."""
        for name, tensor in self._tensors.items():
            for block in tensor.blocks:
                broadcast(block.values.detach(), self._owners[name])


def broadcast(values: torch.Tensor, source: int) -> None:
    """Broadcast ``values`` in pieces, in place; values that are not contiguous through a copy of a piece."""
    group = parallel_state.get_data_parallel_group()
    if needs_host(values, group):
        _broadcast_through_host(values, source)
        return
    # A backend only of devices, such as NCCL, takes no memory of the host.
    takes_host = dist.get_backend(group) == dist.Backend.GLOO
    device = values.device if takes_host or values.is_cuda else parallel_state.local_device()
    for piece in _pieces(values):
        sent = piece.contiguous().to(device)
        dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=source)
        if sent is not piece:
            piece.copy_(sent)


def _broadcast_through_host(values: torch.Tensor, source: int) -> None:
    """Broadcast ``values`` of a device through a copy of all of it: a piece of a lazy device is a graph of its own."""
    device, is_source = device_of(values.device), parallel_state.get_data_parallel_rank() == source
    host = device.to_host(values)() if is_source else torch.empty_like(values, device="cpu")
    broadcast(host, source)
    if not is_source:
        device.fill(values, host)


def _pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of ``values`` of ``_PIECE_BYTES`` or less, or of one row."""
    if values.numel() == 0:
        return
    if values.is_contiguous():
        yield from values.view(-1).split(max(1, _PIECE_BYTES // values.element_size()))
        return
    row = values[0].numel() * values.element_size()
    yield from values.split(max(1, _PIECE_BYTES // row))


def _digest(tensors: Mapping[str, TensorBlocks]) -> int:
    described = [
        (name, tensor.shape, str(tensor.dtype), [(block.offsets, tuple(block.values.shape)) for block in tensor.blocks])
        for name, tensor in sorted(tensors.items())
    ]
    contiguous = [[block.values.is_contiguous() for block in tensor.blocks] for _, tensor in sorted(tensors.items())]
    return zlib.crc32(repr((described, contiguous)).encode())
