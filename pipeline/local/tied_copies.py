"""Copies of a weight that several ranks hold start equal: the weight's first owner sends its own to the others.

It is sent in pieces, so that no rank has memory for a second copy, and always. Finding out first whether copies are
equal takes as long: gloo sends 1.5 to 1.8 GB/s from process to process of one machine, a core that is shared with
another process reads 0.7 to 0.8 GB/s into a SHA-256, and between two GPUs sending takes next to nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.parallel_layers import failure_watch
from nxdpp.pipeline.local.tied_weights import TiedWeight
from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport

_PIECE_BYTES = 32 * 2**20


class _Copy(NamedTuple):
    """What a rank tells of its copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]


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
            _send(module.get_parameter(weight.name), weight, transport, dist.get_rank(group))


@contextmanager
def _told() -> Iterator[None]:
    """What fails here leaves other ranks waiting, and ends them."""
    try:
        yield
    except Exception as error:
        failure_watch.report(error)
        raise


def _describe(name: str, parameter: nn.Parameter) -> _Copy:
    return _Copy(name, str(parameter.dtype), tuple(parameter.shape))


def _check_alike(everybodys: Sequence[Mapping[int, _Copy]]) -> None:
    known: dict[int, tuple[int, _Copy]] = {}
    for rank, copies in enumerate(everybodys):
        for number, copy in copies.items():
            first, theirs = known.setdefault(number, (rank, copy))
            if copy[1:] != theirs[1:]:
                raise RuntimeError(
                    f"a weight that several stages share is {theirs.dtype} of {list(theirs.shape)} on pipeline rank "
                    f"{first} ({theirs.name}) and {copy.dtype} of {list(copy.shape)} on pipeline rank {rank} "
                    f"({copy.name}). Do on every rank what changes it."
                )


def _send(parameter: nn.Parameter, weight: TiedWeight, transport: Transport, rank: int) -> None:
    first, *others = weight.ranks
    values = parameter.detach().contiguous()
    for piece in _pieces(values):
        if rank == first:
            for work, _ in [transport.send(piece, other, Direction.ACTIVATION, weight.number) for other in others]:
                work.wait()
        else:
            (layout,) = layout_of(piece).tensors
            piece.copy_(transport.post_receive(layout, first, Direction.ACTIVATION, weight.number)())
    if rank != first and not parameter.is_contiguous():
        parameter.detach().copy_(values)


def _pieces(dense: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat parts of a contiguous tensor, in its own memory."""
    return iter(dense.view(-1).split(max(1, _PIECE_BYTES // dense.element_size())))
