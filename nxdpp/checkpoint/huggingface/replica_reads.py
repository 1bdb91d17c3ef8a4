"""Tensors that all data-parallel replicas load: each is read and converted by one replica, and sent to the others.

::

    replica 0   reads a, b ─┐ all reads    ┌ sends a, b ─▶ has a, b, c, d
    replica 1   reads c, d ─┴ succeeded ───┴ sends c, d ─▶ has a, b, c, d

A replica reads tensors that follow each other in the files.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from nxdpp.checkpoint.distributed.shared_reads import broadcast
from nxdpp.checkpoint.huggingface.file_tensors import Wanted
from nxdpp.checkpoint.huggingface.loading_ranks import LoadingRanks
from nxdpp.checkpoint.huggingface.model_tensors import place_in_files
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import board


class ReplicaReads:
    """The conversions of this rank, and the replica that reads the sources of each; collective over all ranks.

    Replicas that load different files, headers, tensors or dtypes each read all of their own.

    Args:
        conversions: with the tensors of this rank.
        sizes: bytes of the sources of each in the files.
        ranks: the ranks that load.
        digest: of the files.
    """

    def __init__(self, conversions: Wanted, sizes: Sequence[int], ranks: LoadingRanks, digest: int) -> None:
        self._conversions = conversions
        self._owners: list[int] = []
        self._replica = 0
        self._ranks = ranks
        self._are_files_equal = False
        if ranks.count == 1:
            return
        digests = ranks.all_of((digest, _digest(conversions)))
        self._are_files_equal = len({files for files, _ in digests}) == 1
        group = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
        if len(group) > 1 and len({digests[rank] for rank in group}) == 1:
            self._replica = parallel_state.get_data_parallel_rank()
            self._owners = _owners(sizes, len(group))

    def here(self) -> Wanted:
        """The conversions whose sources this rank reads."""
        return [each for each, owner in zip(self._conversions, self._of_each(), strict=True) if owner == self._replica]

    def compared_here(self, groups: Sequence[list[str]]) -> Sequence[list[str]]:
        """The ``groups`` of tied tensors whose copies this rank compares: one rank compares each group."""
        return groups[self._ranks.rank :: self._ranks.count] if self._are_files_equal else groups

    @torch.no_grad()
    def send(self, filled: Sequence[Sequence[torch.Tensor]]) -> None:
        """Send the tensors that each conversion fills, in place, from the replica that has read them.

        Collective over the data group.
        """
        for tensors, owner in zip(filled, self._owners, strict=bool(self._owners)):
            for tensor in tensors:
                board.moved()
                broadcast(tensor.detach(), owner)

    def _of_each(self) -> list[int]:
        return self._owners or [self._replica] * len(self._conversions)


def _owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """The replica of each of ``sizes``: neighbours share one, and all replicas get about as many bytes."""
    whole, before, owners = sum(sizes), 0, []
    for size in sizes:
        owners.append(min(replicas - 1, (2 * before + size) * replicas // max(1, 2 * whole)))
        before += size
    return owners


def _digest(conversions: Wanted) -> int:
    described = [
        (
            conversion.names,
            [(name, tuple(each.shape), each.stride(), str(each.dtype), place_in_files(each)) for name, each in wanted],
        )
        for conversion, wanted in conversions
    ]
    return zlib.crc32(repr(described).encode())
