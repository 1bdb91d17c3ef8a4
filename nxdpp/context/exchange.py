"""Heads and tokens of attention change places between the ranks of a context group, in one message to each rank.

Two ranks, four heads, one sequence; ``hT`` is head h for the tokens of T, ``a`` those of rank 0 and ``b`` of rank 1::

    rank 0   0a 1a 2a 3a        ─ to_heads ─▶    0a 0b  1a 1b     all tokens of its heads
    rank 1   0b 1b 2b 3b        ◀─ to_tokens ─   2a 2b  3a 3b

Queries, keys and values go together. The backward of each is the other. After Jacobs et al., "DeepSpeed Ulysses" (arXiv
2309.14509).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nxdpp.context.cut import order_of, own_places, places_of
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, on_wire
from nxdpp.tensor.collectives import outside_of_graph


def to_heads(tensors: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Return tensors ``(B, heads / ranks, length, D)`` for ``tensors`` ``(B, heads, own tokens, D)``.

    Collective over the context group. ``length`` is that of the whole sequence.
    """
    return list(_ToHeads.apply(length, *tensors))  # type: ignore[no-untyped-call]


def to_tokens(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``(B, heads, own tokens, D)`` for ``tensor`` ``(B, heads / ranks, length, D)``; undoes ``to_heads``."""
    tokens: torch.Tensor = _ToTokens.apply(length, tensor)  # type: ignore[no-untyped-call]
    return tokens


def _heads(length: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    ranks = parallel_state.get_context_model_parallel_size()
    counts = [len(places) for places in places_of(length, ranks)]
    # Of one token, for one rank.
    sizes = [tensor[:, :, 0].numel() // ranks for tensor in tensors]
    parts = [tensor.chunk(ranks, dim=1) for tensor in tensors]
    message = torch.cat([part[rank].reshape(-1) for rank in range(ranks) for part in parts])
    received = [sum(sizes) * count for count in counts]
    came = _exchanged(message, [len(message) // ranks] * ranks, received)
    blocks = [block.split([size * count for size in sizes]) for block, count in zip(came, counts, strict=True)]
    order = order_of(length, ranks, message)
    whole = []
    for number, part in enumerate(parts):
        rows, heads, _, width = part[0].shape
        pieces = [block[number].view(rows, heads, -1, width) for block in blocks]
        whole.append(torch.cat(pieces, dim=2).index_select(2, order))
    return whole


def _tokens(length: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    ranks, rank = parallel_state.get_context_model_parallel_size(), parallel_state.get_context_model_parallel_rank()
    places = [own_places(length, ranks, each, tensors[0]) for each in range(ranks)]
    pieces = [[tensor.index_select(2, own).reshape(-1) for tensor in tensors] for own in places]
    sent = [sum(map(len, each)) for each in pieces]
    message = torch.cat([piece for each in pieces for piece in each])
    came = _exchanged(message, sent, [sent[rank]] * ranks)
    own = [len(piece) for piece in pieces[rank]]
    blocks = [block.split(own) for block in came]
    joined = []
    for number, tensor in enumerate(tensors):
        rows, heads, _, width = tensor.shape
        joined.append(torch.cat([block[number].view(rows, heads, -1, width) for block in blocks], dim=1))
    return joined


def _exchanged(message: torch.Tensor, sent: list[int], received: list[int]) -> tuple[torch.Tensor, ...]:
    """Send ``sent[r]`` elements to rank ``r``, in the order of ranks; return the ``received[r]`` elements of each."""
    group = parallel_state.get_context_model_parallel_group()
    wire = on_wire(outside_of_graph(message), group)
    result = wire.new_empty(sum(received))
    with Wait("exchange of heads and tokens", group):
        dist.all_to_all_single(result, wire, received, sent, group)
    board.moved()
    came: torch.Tensor = from_wire(result, message.device)
    parts: tuple[torch.Tensor, ...] = came.split(received)
    return parts


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, length: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.length = length
        return tuple(_heads(length, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_tokens(ctx.length, gradients)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, length: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.length = length
        return _tokens(length, [tensor])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _heads(ctx.length, gradients)[0]
