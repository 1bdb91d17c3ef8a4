"""Experts of a layer over the ranks of an expert group: tokens go to their experts' ranks and back.

Two ranks with two experts each; token a of rank 0 goes to experts 1 and 2, with weights v and w::

    rank 0   a ─ sort by expert ─▶ [a.1] [a.2] ── all-to-all ──▶ experts 0, 1 of all ranks' tokens ─┐
    rank 1   ...                             └───────────────▶ experts 2, 3 of all ranks' tokens ──┤
    rank 0   v y1 + w y2 ◀─ restore the order, weigh, sum ◀─────────── all-to-all ──────────────────┘

The routing weights stay where the token is. So the products are added up in the order of a token's choices, as in the
grouped experts of transformers in one process. The numbers of tokens go first, in a message of one number for each
expert and their sum: nothing is dropped or padded, and a rank knows how busy its experts are (``routing.py``). An
all-to-all is one node of autograd, whose backward is the all-to-all in the other direction. A backward, also a split
one, runs a node once. Between the two the gradients are divided by the number of ranks, so those of the experts are the
mean over the replicas whose tokens came (``gradients/expert_parameters.py``). Each rank of the group makes the same
messages in the same order, since all run one schedule (``Experts`` in ``participant.py`` verifies it). The numbers of
tokens come with the number of the call: a layer that one rank skips or calls once more is named.

The way of a token is that of Lepikhin et al., "GShard" (arXiv 2006.16668), without its capacity.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nxdpp.experts.participant import Experts
from nxdpp.experts.routing import routing_of
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, on_wire
from nxdpp.tensor.collectives import has_values, outside_of_graph
from nxdpp.tensor.tensor_attributes import KeepsAttributes

# Returns the outputs (rows, H) of rows (rows, H), given the expert (rows, 1) of each and ones (rows, 1) as weights.
LocalExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DividedExperts(KeepsAttributes):
    """Experts module that has this rank's experts, and is called with the tokens of this rank.

    Its class has a ``forward`` of hidden states ``(N, H)``, the chosen experts ``(N, K)`` and their weights ``(N, K)``,
    in this order or with the last two exchanged, as transformers' experts have. It returns ``(N, H)``: for each token
    the outputs of its experts, weighted and added up.
    """

    participant_of_steps = Experts

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the outputs ``(N, H)`` of tokens of this rank; collective over the expert group.

        Raises ``ValueError`` for other arguments than those of the class.
        """
        own: LocalExperts = super().forward
        given = list(inspect.signature(own).bind(*args, **kwargs).arguments.values()) if kwargs else list(args)
        hidden, weights, place = _checked(given, type(self).__name__)
        index = given[place]
        rows = hidden.reshape(-1, hidden.shape[-1])

        def run(tokens: torch.Tensor, local: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
            return own(tokens, local, ones) if place == 1 else own(tokens, ones, local)

        count = next(len(each) for each in self.parameters(recurse=False) if is_of_experts(each))
        choices, routing = index.reshape(len(rows), index.shape[-1]), routing_of(self)
        weights = weights.reshape(choices.shape)
        if not has_values(hidden):
            # A count of costs: as many rows as this rank has on average.
            return run(rows, choices % count, weights).view_as(hidden)
        if routing is None:
            return dispatched(run, count, rows, choices, weights)[0].view_as(hidden)
        call = routing.choose(self, choices)
        outputs, tokens = dispatched(run, count, rows, choices, weights, routing.number_of(self), routing.text_of)
        routing.note(self, call, tokens)
        return outputs.view_as(hidden)


def dispatched(
    run: LocalExperts,
    count: int,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    call: int = 0,
    text_of: Callable[[int], str] = str,
) -> tuple[torch.Tensor, list[int]]:
    """Return the outputs of all chosen experts ``(N, H)``; collective over the expert group.

    Returns too how many tokens came to each expert of this rank, and last the tokens of all experts.

    Args:
        run: computes rows with this rank's experts, of which ``index`` counts from 0.
        count: experts of each rank.
        hidden: this rank's tokens, ``(N, H)``; other ranks may have another number, or none.
        index: the chosen experts of all ranks, int64 ``(N, K)``.
        weights: of the choices, ``(N, K)``.
        call: number that all ranks have in this call.
        text_of: describes the call of a number.

    Raises ``ValueError`` for experts that are not there, and ``RuntimeError`` for ranks in different calls.
    """
    group = parallel_state.get_expert_model_parallel_group()
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
    came = _exchanged(torch.cat([counts, *told], dim=1), [1] * ranks, [1] * ranks, group)
    theirs, calls = came[:, :-2], came[:, -1]
    # One copy to the host, which waits for it.
    numbers = torch.cat([calls, counts.sum(1), theirs.sum(1), came[:, :-1].sum(0)]).tolist()
    _check_calls(numbers[:ranks], call, text_of)
    sent, received, tokens = numbers[ranks : 2 * ranks], numbers[2 * ranks : 3 * ranks], numbers[3 * ranks :]
    # Send each pair of a token and an expert, and compute.
    rows = _all_to_all(hidden[order // choices], sent, received, group, scale=ranks)
    local = torch.arange(count, device=hidden.device).repeat(ranks).repeat_interleave(theirs.reshape(-1))
    outputs = _computed(run, rows, local)
    # Return the outputs, weigh them where the token is, and add them up in the order of its choices.
    back = _all_to_all(outputs, received, sent, group, scale=1 / ranks)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    weighted = back[places].view(*index.shape, -1) * weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden.dtype), tokens


def _computed(run: LocalExperts, rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the outputs of ``rows``, which belong to the experts ``local``, ``(rows,)``."""
    if len(rows):
        outputs = run(rows, local.unsqueeze(-1), torch.ones_like(local, dtype=rows.dtype).unsqueeze(-1))
        if outputs.shape != rows.shape:
            raise ValueError(
                f"experts returned {list(outputs.shape)} for {list(rows.shape)}: experts over ranks return a row for "
                f"each token, whatever other tokens there are"
            )
        return outputs
    # No token came. The graph is that of one row, so the backward makes the messages that the other ranks wait for.
    one = rows.sum(dim=0, keepdim=True)
    return run(one, local.new_zeros(1, 1), one.new_ones(1, 1))[:0]


def _check_calls(calls: Sequence[int], own: int, text_of: Callable[[int], str]) -> None:
    """Raise ``RuntimeError`` for ranks of the expert group in other ``calls`` than this rank's ``own``."""
    other = next((rank for rank, call in enumerate(calls) if call != own), None)
    if other is not None:
        raise RuntimeError(
            f"rank {other} of the expert group sends tokens of {text_of(calls[other])}, and rank "
            f"{parallel_state.get_expert_model_parallel_rank()} those of {text_of(own)}: every replica must call the "
            f"same experts in the same order, whatever its tokens are. Call the layer with no rows, (0, H), where a "
            f"replica has no token for it."
        )


def _checked(given: Sequence[Any], name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return hidden states, weights, and the place of the chosen experts among ``given``."""
    tensors = len(given) == 3 and all(isinstance(each, torch.Tensor) for each in given)
    whole = [place for place in (1, 2) if tensors and not given[place].is_floating_point()]
    fits = len(whole) == 1 and given[1].shape == given[2].shape and given[1].dim()
    if not fits or given[1].numel() != given[0][..., 0].numel() * given[1].shape[-1]:
        shown = ", ".join(
            f"{each.dtype} {list(each.shape)}" if isinstance(each, torch.Tensor) else type(each).__name__
            for each in given
        )
        raise ValueError(
            f"{name} is called with {shown}. Experts over ranks take hidden states (N, H), the chosen experts (N, K) "
            f"and their weights (N, K): train it without expert_parallelize, or name another module in its plan."
        )
    return given[0], given[3 - whole[0]], whole[0]


class _AllToAll(torch.autograd.Function):
    """Rows of a tensor to the ranks of a group; gradients of the rows come back, multiplied by ``scale``."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, scale: float
    ) -> torch.Tensor:
        """Return the rows that come to this rank, in the order of their ranks."""
        ctx.given, ctx.scale = (received, sent, group), scale
        return outside_of_graph(_exchanged(rows, sent, received, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (gradient,) = gradients
        return _exchanged(gradient, *ctx.given) * ctx.scale, None, None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, scale: float
) -> torch.Tensor:
    """Send ``sent[r]`` rows to rank ``r`` of ``group``, in the order of ranks, and return ``received[r]`` of each."""
    there: torch.Tensor = _AllToAll.apply(rows, sent, received, group, scale)  # type: ignore[no-untyped-call]
    return there


def _exchanged(tensor: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    message = on_wire(outside_of_graph(tensor.contiguous()), group)
    result = message.new_empty((sum(received), *message.shape[1:]))
    board.moved()
    with Wait("tokens of experts", group):
        dist.all_to_all_single(result, message, received, sent, group)
    board.moved()
    return from_wire(result, tensor.device)
