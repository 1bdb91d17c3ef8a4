"""The parts of a sequence that context ranks have."""

import pytest
import torch

from nxdpp.context.cut import order_of, places_of


@pytest.mark.parametrize(("length", "ranks"), [(10, 2), (16, 2), (13, 4), (3, 2), (1, 4), (0, 2)])
def test_each_token_is_on_one_rank_and_parts_differ_by_two_tokens_at_most(length: int, ranks: int) -> None:
    parts = places_of(length, ranks)
    assert sorted(token for part in parts for token in part) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 2
    joined = torch.tensor([token for part in parts for token in part], dtype=torch.int64)
    assert torch.equal(joined[order_of(length, ranks, joined)], torch.arange(length))


def test_parts_have_equal_work_under_a_causal_mask() -> None:
    # Token t sees t + 1 tokens.
    work = [sum(token + 1 for token in part) for part in places_of(4096, 4)]
    assert max(work) == min(work)
