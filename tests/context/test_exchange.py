"""Heads and tokens change places, and no byte is sent twice."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxdpp import parallel_state
from nxdpp.context.cut import own_places, places_of
from nxdpp.context.exchange import to_heads, to_tokens
from tests.support.run_ranks import run_ranks

LENGTH, HEADS, OF_KEYS = 13, 8, 4


def _whole(heads: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, LENGTH, width, dtype=torch.float64, generator=generator)


def _round_trip(rank: int, ranks: int) -> list[bool]:
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    whole = [_whole(HEADS, 6, 0), _whole(OF_KEYS, 6, 1), _whole(OF_KEYS, 3, 2)]
    places = own_places(LENGTH, ranks, rank, whole[0])
    own = [each.index_select(2, places).requires_grad_() for each in whole]
    found = to_heads(own, LENGTH)
    are_heads = [torch.equal(f, w.chunk(ranks, dim=1)[rank]) for f, w in zip(found, whole, strict=True)]
    back = to_tokens(found[0], LENGTH)
    gradient = _whole(HEADS, 6, 3).index_select(2, places)
    (got,) = torch.autograd.grad(back, own[0], gradient)
    return [*are_heads, torch.equal(back, own[0]), torch.equal(got, gradient)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_and_tokens_change_places_and_their_gradients_go_back(ranks: int) -> None:
    assert run_ranks(ranks, _round_trip, ranks) == [[True] * 5] * ranks


def _sent(rank: int, ranks: int) -> tuple[int, int]:
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    elements: list[int] = []
    send = dist.all_to_all_single

    def counted(result: torch.Tensor, message: torch.Tensor, received: list[int], sent: list[int], *rest: Any) -> Any:
        elements.append(sum(each for to, each in enumerate(sent) if to != rank))
        return send(result, message, received, sent, *rest)

    dist.all_to_all_single = counted  # type: ignore[assignment]  # The rank ends with it.
    own = [torch.zeros(2, heads, len(places_of(LENGTH, ranks)[rank]), 6) for heads in (HEADS, OF_KEYS, OF_KEYS)]
    found = to_heads(own, LENGTH)
    to_tokens(found[0], LENGTH)
    there, back = elements
    return there, back


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_sends_other_ranks_the_heads_of_its_tokens_and_nothing_else(ranks: int) -> None:
    for rank, (there, back) in enumerate(run_ranks(ranks, _sent, ranks)):
        own = len(places_of(LENGTH, ranks)[rank])
        # Heads of other ranks for own tokens, and tokens of other ranks for own heads.
        assert there == 2 * 6 * own * (HEADS + 2 * OF_KEYS) * (ranks - 1) // ranks
        assert back == 2 * 6 * (LENGTH - own) * HEADS // ranks
