"""Experts of a layer over the ranks of an expert group: tokens go to their experts' ranks and back.

Two ranks with two experts each; token a of rank 0 goes to experts 1 and 2, with weights v and w::

    rank 0   a ─ sort by expert ─▶ [a.1] [a.2] ── all-to-all ──▶ experts 0, 1 of all ranks' tokens ─┐
    rank 1   ...                             └───────────────▶ experts 2, 3 of all ranks' tokens ──┤
    rank 0   v y1 + w y2 ◀─ restore the order, weigh, sum ◀─────────── all-to-all ──────────────────┘

The routing weights stay where the token is. So the products are added up in the order of a token's choices, as in the
grouped experts of transformers in one process. The numbers of tokens go first, in a message of one number for each
expert and their sum: nothing is dropped or padded, and a rank knows how busy its experts are (``routing.py``). An
all-to-all is two nodes of autograd: rows leave and come, and in the backward their gradients leave and come. A
backward, also a split one, runs a node once. Between the two all-to-alls gradients are divided by the number of ranks,
so those of the experts are the mean over the replicas whose tokens came (``gradients/expert_parameters.py``). Each rank
of the group makes the same messages in the same order, since all run one schedule (``Experts`` in ``participant.py``
verifies it). The numbers of tokens come with the number of the call: a layer that one rank skips or calls once more is
named. Between leaving and coming the other action of a pair runs (``hand_over``), or the shared experts.

The way of a token is that of Lepikhin et al., "GShard" (arXiv 2006.16668), without its capacity.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nxdpp.devices.collective_bytes import note_tokens
from nxdpp.experts.shared import run_meanwhile
from nxdpp.pipeline.runtime.overlapped_pair import hand_over
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, on_wire
from nxdpp.schedules.actions import ActionKind
from nxdpp.tensor.collectives import outside_of_graph
from nxdpp.tracing.graph.swap import swapped

LocalExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the outputs (rows, H) of rows (rows, H), given the expert (rows, 1) of each and ones (rows, 1) as weights."""


def dispatched(
    run: LocalExperts,
    count: int,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    group: dist.ProcessGroup,
    call: int = 0,
    text_of: Callable[[int], str] = str,
    mean: bool = True,
) -> tuple[torch.Tensor, list[int]]:
    """Return the outputs of all chosen experts ``(N, H)``; collective over the expert group.

    Returns too how many tokens came to each expert of this rank, and last the tokens of all experts.

    Args:
        run: computes rows with this rank's experts, of which ``index`` counts from 0.
        count: experts of each rank.
        hidden: this rank's tokens, ``(N, H)``; other ranks may have another number, or none.
        index: the chosen experts of all ranks, int64 ``(N, K)``.
        weights: of the choices, ``(N, K)``.
        group: the expert group.
        call: number that all ranks have in this call.
        text_of: describes the call of a number.
        mean: gradients of experts are the mean over the ranks of ``group``, or the sum.

    Raises ``ValueError`` for experts that are not there, and ``RuntimeError`` for ranks in different calls.
    """
    ranks, choices = dist.get_world_size(group), index.shape[-1]
    experts = index.reshape(-1)
    # Stable: rows of an expert stay in the order of their tokens.
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=ranks * count)
    if len(counts) > ranks * count:
        raise ValueError(
            f"a token of {text_of(call)} has expert {len(counts) - 1}, and there are {ranks * count}: let the router "
            f"choose experts below {ranks * count}"
        )
    counts = counts.view(ranks, count)
    told = [counts.new_full((ranks, 1), each) for each in (len(experts), call)]
    numbers_of_tokens = _Exchange([1] * ranks, [1] * ranks, group, ActionKind.DISPATCH)
    numbers_of_tokens.begin(torch.cat([counts, *told], dim=1))
    came = numbers_of_tokens.end()
    theirs, calls = came[:, :-2], came[:, -1]
    # One copy to the host, which waits for it.
    numbers = torch.cat([calls, counts.sum(1), theirs.sum(1), came[:, :-1].sum(0)]).tolist()
    _check_calls(numbers[:ranks], call, text_of, dist.get_rank(group))
    sent, received, tokens = numbers[ranks : 2 * ranks], numbers[2 * ranks : 3 * ranks], numbers[3 * ranks :]
    # Send each pair of a token and an expert, and compute.
    scale = 1 if not mean else ranks
    rows = _all_to_all(hidden[order // choices], sent, received, group, ActionKind.DISPATCH, scale)
    local = torch.arange(count, device=hidden.device).repeat(ranks).repeat_interleave(theirs.reshape(-1))
    outputs = _computed(run, rows, local)
    back = _all_to_all(outputs, received, sent, group, ActionKind.COMBINE, 1 / scale)
    return _weighed(back, order, weights, hidden.dtype), tokens


def _weighed(back: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weigh outputs where the token is, and add them up in the order of its choices."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    weighted = back[places].view(*weights.shape, -1) * weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(dtype)


# Tokens of a rank in a count of costs, over the mean of its expert group.
_load = 1.0


@contextmanager
def load_of(times: float) -> Iterator[None]:
    """Let a rank of a count of costs have ``times`` as many tokens as the mean of its expert group."""
    with swapped(globals(), {"_load": times}):
        yield


def counted_tokens(
    run: LocalExperts, count: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Do without other ranks, and without values, what ``dispatched`` does; note the messages."""
    order = index.reshape(-1).argsort(stable=True)
    number = torch.arange(round(len(order) * _load), device=order.device)
    # Rows that come are in memory of their own.
    came = hidden[order // index.shape[-1]][number % max(len(order), 1)]
    note_tokens(came.nbytes)
    outputs = _computed(run, came, number % count)
    note_tokens(outputs.nbytes)
    return _weighed(outputs[number[: len(order)]], order, weights, hidden.dtype)


def _computed(run: LocalExperts, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the outputs of ``rows``, which belong to the experts ``local``, ``(rows,)``."""
    if len(rows):
        outputs = run(rows, local.unsqueeze(-1), torch.ones_like(local, dtype=rows.dtype).unsqueeze(-1))
        if outputs.numel() != rows.numel() or len(outputs) != len(rows):
            raise ValueError(
                f"experts returned {list(outputs.shape)} for {list(rows.shape)}: experts over ranks return a row for "
                f"each token, whatever other tokens there are"
            )
        return outputs.view_as(rows)
    # No token came. The graph is that of one row, so the backward makes the messages that the other ranks wait for.
    one = rows.sum(dim=0, keepdim=True)
    return run(one, local.new_zeros(1, 1), one.new_ones(1, 1)).view_as(one)[:0]


def _check_calls(calls: Sequence[int], own: int, text_of: Callable[[int], str], own_rank: int) -> None:
    """Raise ``RuntimeError`` for ranks of the expert group in other ``calls`` than this rank's ``own``."""
    other = next((rank for rank, call in enumerate(calls) if call != own), None)
    if other is not None:
        raise RuntimeError(
            f"rank {other} of the expert group sends tokens of {text_of(calls[other])}, and rank "
            f"{own_rank} those of {text_of(own)}: every replica must call the "
            f"same experts in the same order, whatever its tokens are. Call the layer with no rows, (0, H), where a "
            f"replica has no token for it."
        )


class _Exchange:
    """Rows of a tensor to the ranks of a group, and the gradients of the rows back, multiplied by ``scale``.

    Args:
        sent: rows for each rank, in the order of ranks.
        received: rows of each rank.
        group: the ranks.
        kind: ``DISPATCH`` or ``COMBINE``.
        scale: of the gradients.
    """

    def __init__(
        self, sent: list[int], received: list[int], group: dist.ProcessGroup, kind: ActionKind, scale: float = 1.0
    ) -> None:
        self._sent, self._received, self._group, self._kind, self.scale = sent, received, group, kind, scale
        self._came: Callable[[], torch.Tensor] | None = None

    def begin(self, rows: torch.Tensor, of_backward: bool = False) -> None:
        """Start to send ``rows``."""
        sent, received = (self._received, self._sent) if of_backward else (self._sent, self._received)
        message = on_wire(outside_of_graph(rows.contiguous()), self._group)
        result = message.new_empty((sum(received), *message.shape[1:]))
        board.moved()
        work = dist.all_to_all_single(result, message, received, sent, self._group, async_op=True)
        assert work is not None, "this rank is in the group"

        def wait() -> torch.Tensor:
            hand_over(self._kind, of_backward)
            with Wait("tokens of experts", self._group):
                work.wait()
            board.moved()
            return from_wire(result, rows.device)

        self._came = wait

    def end(self) -> torch.Tensor:
        """Wait for the rows that come, and return them."""
        assert self._came is not None, "it has begun"
        came, self._came = self._came(), None
        return came


class _Leave(torch.autograd.Function):
    """Starts an exchange; its backward waits for the gradients of the rows.

    The result stands for the rows until they come: the forward of ``_Come`` waits for these. So whatever is computed
    between the two is computed while rows, or gradients, are on their way.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        """Return a tensor without rows."""
        ctx.exchange = exchange
        exchange.begin(rows)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange: _Exchange = ctx.exchange
        return exchange.end() * exchange.scale, None


class _Come(torch.autograd.Function):
    """Ends the exchange that ``_Leave`` has started; its backward starts the one of the gradients."""

    @staticmethod
    def forward(ctx: Any, leaving: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        """Return the rows that come to this rank, in the order of their ranks."""
        ctx.exchange = exchange
        return outside_of_graph(exchange.end())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        exchange: _Exchange = ctx.exchange
        exchange.begin(gradient, of_backward=True)
        return gradient.new_empty(0), None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, kind: ActionKind, scale: float
) -> torch.Tensor:
    """Send ``sent[r]`` rows to rank ``r`` of ``group``, in the order of ranks, and return ``received[r]`` of each."""
    exchange = _Exchange(sent, received, group, kind, scale)
    leaving = _Leave.apply(rows, exchange)  # type: ignore[no-untyped-call]
    if kind is ActionKind.DISPATCH:
        run_meanwhile()
    came: torch.Tensor = _Come.apply(leaving, exchange)  # type: ignore[no-untyped-call]
    return came
