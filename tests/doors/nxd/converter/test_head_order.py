"""Order of heads over NxD's tensor ranks."""

import pytest
import torch

from nxdpp.doors.nxd.converter.head_order import HeadOrder, are_copies, heads_of_model, heads_of_rank


def test_the_orders_of_the_drawing() -> None:
    trn1, trn2 = (HeadOrder(8, 2, ranks=4, multiplier=2, backend=backend) for backend in ("trn1", "trn2"))
    assert trn1.queries == [0, 1, 4, 5, 2, 3, 6, 7]
    assert trn2.queries == [0, 1, 2, 3, 4, 5, 6, 7]
    assert trn1.key_values("trn1") == [0, 1, 0, 1]
    assert trn1.key_values("trn2") == [0, 0, 1, 1]


@pytest.mark.parametrize("backend", ["trn1", "trn2"])
@pytest.mark.parametrize(("queries", "keys", "ranks", "multiplier"), [(64, 8, 32, 4), (8, 4, 2, 1), (12, 2, 4, 2)])
def test_query_heads_are_with_their_key_value_head(
    backend: str, queries: int, keys: int, ranks: int, multiplier: int
) -> None:
    order = HeadOrder(queries, keys, ranks, multiplier, backend)
    block = queries // (keys * multiplier)
    heads = [head for head in order.queries if head is not None]
    assert [head // (queries // keys) for head in heads[::block]] == order.key_values(backend)
    assert sorted(heads) == list(range(queries))


def test_added_heads_are_zeros_and_last_of_their_group() -> None:
    order = HeadOrder(12, 2, ranks=8, multiplier=4, backend="trn1", pads=True)
    assert order.queries == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, None, None, None, None]
    whole = torch.arange(1.0, 25).view(24, 1)
    parts = [heads_of_rank(whole, order.queries, 12, 0, rank, 8) for rank in range(8)]
    assert parts[1].flatten().tolist() == [13, 14, 15, 16]
    assert not torch.cat(parts[6:]).any()
    assert torch.equal(heads_of_model(parts, order.queries, 12, 0), whole)


def test_copies_are_compared() -> None:
    parts = [torch.tensor([[value]]) for value in (1.0, 2.0, 1.0, 2.0)]
    assert are_copies(parts, [0, 1, 0, 1], 0)
    assert not are_copies(parts, [0, 0, 1, 1], 0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((6, 2, 4, 2), "6 query heads do not divide over 2 key-value heads with --kv_size_multiplier 2 on 4"),
        ((8, 2, 4, 1), "8 query heads and 2 copies of key-value heads do not divide over 4 tensor ranks"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(numbers: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadOrder(*numbers, backend="trn1")


@pytest.mark.parametrize(("backend", "pads"), [("trn1", True), ("trn2", False)])
def test_padding_is_no_remedy_where_it_is_given_or_refused(backend: str, pads: bool) -> None:
    with pytest.raises(ValueError, match=r"on 4 tensor ranks\. Choose numbers that do\.$"):
        HeadOrder(6, 3, 4, 4, backend, pads)


def test_padding_is_of_trn1() -> None:
    with pytest.raises(ValueError, match=r"--pad_attn_heads is for --hw_backend trn1"):
        HeadOrder(12, 2, 8, 4, "trn2", pads=True)
