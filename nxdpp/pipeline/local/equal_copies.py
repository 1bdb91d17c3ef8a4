"""Copies of tied weights that get the values of the first one: when the model is moved to its device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from nxdpp.devices.kinds import device_of
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import gather_values

# Copies are sent in pieces of this size, so that no rank needs memory for a second copy.
_PIECE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class TiedWeight:
    """A parameter of this rank, of which other ranks hold copies.

    A stage of this rank uses it under ``name``; ``names`` are all its names when the model was wrapped. ``ranks`` are
    its owners in ascending order, this rank included. ``number`` identifies the weight on all ranks.
    """

    name: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    number: int


def make_equal(
    weights: Sequence[tuple[TiedWeight, nn.Parameter]], rank: int, transport: Transport, group: dist.ProcessGroup
) -> None:
    """Give every owner of each weight the values of its first owner; collective over the pipeline.

    Values are sent even where copies are equal: comparing hashes first takes as long. gloo sends 1.5 to 1.8 GB/s
    between processes of one machine. A shared core reads 0.7 to 0.8 GB/s into SHA-256.

    Args:
        weights: with the copies of this ``rank``.
        rank: pipeline rank of this process.
        transport: for the device of the copies.
        group: the ranks of the pipeline, for CPU tensors.

    Raises:
        RuntimeError: on all ranks, where copies of a weight have different shapes or dtypes.
    """
    with failure_watch.reported():
        own = {w.number: _Copy(w.name, str(p.dtype), tuple(p.shape)) for w, p in weights}
        everyones = gather_values(own, group)
    # All ranks raise here or none does, so no rank is left waiting.
    _check_alike(everyones)
    with failure_watch.reported():
        for weight, parameter in weights:
            _send(parameter, weight, transport, rank)


class _Copy(NamedTuple):
    """Description of a rank's copy that all ranks compare."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def _check_alike(everyones: Sequence[Mapping[int, _Copy]]) -> None:
    known: dict[int, tuple[int, _Copy]] = {}
    for rank, copies in enumerate(everyones):
        for number, copy in copies.items():
            first, theirs = known.setdefault(number, (rank, copy))
            if copy[1:] != theirs[1:]:
                raise RuntimeError(
                    f"a tied weight is {theirs.dtype} of {list(theirs.shape)} on pipeline rank "
                    f"{first} ({theirs.name}) and {copy.dtype} of {list(copy.shape)} on pipeline rank {rank} "
                    f"({copy.name}). Apply the same change on every rank."
                )


def _send(parameter: nn.Parameter, weight: TiedWeight, transport: Transport, rank: int) -> None:
    first, *others = weight.ranks
    own = local_rows(parameter.detach())
    values = own.contiguous()
    # Each piece of a lazy device would be a graph of its own.
    is_whole = device_of(values.device).is_lazy
    for piece in [values] if is_whole else values.view(-1).split(max(1, _PIECE_BYTES // values.element_size())):
        if rank == first:
            works = [transport.send(piece, other, Direction.ACTIVATION, weight.number) for other in others]
            with Wait(f"values of {weight.name}"):
                for work, _ in works:
                    work.wait()
        else:
            (layout,) = layout_of(piece).tensors
            piece.copy_(transport.post_receive(layout, first, Direction.ACTIVATION, weight.number)())
    if rank != first and not own.is_contiguous():
        own.copy_(values)
