"""Copies of a weight that several ranks hold start equal.

Each owner hashes its copy, all compare hashes, and where one differs the weight's first owner sends it its own, in
pieces. Copies are mostly equal, since all ranks build the same model: hashing takes 0.6 s a gigabyte (SHA-256, on the
host) and takes no network, and no memory for a second copy.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.parallel_layers import failure_watch
from nxdpp.pipeline.layout import layout_of
from nxdpp.pipeline.tied_weights import TiedWeight
from nxdpp.pipeline.transport import Direction, Transport

_PIECE_BYTES = 32 * 2**20


class _Copy(NamedTuple):
    """What a rank tells of its copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def make_copies_equal(
    module: nn.Module, weights: Sequence[TiedWeight], transport: Transport, group: dist.ProcessGroup
) -> None:
    """Give every owner of each weight the values of its first owner; collective over the pipeline.

    Args:
        module: with this rank's copies.
        weights: those of this rank, in the order of their numbers.
        transport: for the device that the copies are on.
        group: over the ranks of the pipeline, taking CPU tensors.

    Raises:
        RuntimeError: on all ranks, where copies of a weight have different shapes or dtypes.
    """
    everybodys: list[Any] = [None] * dist.get_world_size(group)
    with _told():
        own = {weight.number: _describe(weight.name, module.get_parameter(weight.name)) for weight in weights}
        dist.all_gather_object(everybodys, own, group=group)
    # All ranks find the same, and none waits for another.
    _check_alike(everybodys)
    with _told():
        for weight in weights:
            _send_where_different(
                module.get_parameter(weight.name), weight, everybodys, transport, dist.get_rank(group)
            )


@contextmanager
def _told() -> Iterator[None]:
    """What fails here leaves other ranks waiting, and ends them."""
    try:
        yield
    except Exception as error:
        failure_watch.report(error)
        raise


def _describe(name: str, parameter: nn.Parameter) -> _Copy:
    content = hashlib.sha256()
    for piece in _pieces(parameter.detach().contiguous()):
        content.update(piece.view(torch.uint8).cpu().numpy().data)
    return _Copy(name, str(parameter.dtype), tuple(parameter.shape), content.digest())


def _check_alike(everybodys: Sequence[Mapping[int, _Copy]]) -> None:
    known: dict[int, tuple[int, _Copy]] = {}
    for rank, copies in enumerate(everybodys):
        for number, copy in copies.items():
            first, theirs = known.setdefault(number, (rank, copy))
            if copy[1:3] != theirs[1:3]:
                raise RuntimeError(
                    f"a weight that several stages share is {theirs.dtype} of {list(theirs.shape)} on pipeline rank "
                    f"{first} ({theirs.name}) and {copy.dtype} of {list(copy.shape)} on pipeline rank {rank} "
                    f"({copy.name}). Do on every rank what changes it."
                )


def _send_where_different(
    parameter: nn.Parameter,
    weight: TiedWeight,
    everybodys: Sequence[Mapping[int, _Copy]],
    transport: Transport,
    rank: int,
) -> None:
    first, *others = weight.ranks
    digests = [copies[weight.number].digest if weight.number in copies else b"" for copies in everybodys]
    different = [other for other in others if digests[other] != digests[first]]
    if rank == first:
        for other in different:
            for piece in _pieces(parameter.detach().contiguous()):
                transport.send(piece, other, Direction.ACTIVATION, weight.number)[0].wait()
    elif rank in different:
        values = parameter.detach().contiguous()
        for piece in _pieces(values):
            (layout,) = layout_of(piece).tensors
            piece.copy_(transport.post_receive(layout, first, Direction.ACTIVATION, weight.number)())
        if not parameter.is_contiguous():
            parameter.detach().copy_(values)


def _pieces(dense: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat parts of a contiguous tensor, in its own memory."""
    return iter(dense.view(-1).split(max(1, _PIECE_BYTES // dense.element_size())))
