"""Order of heads over NxD's tensor ranks."""

import torch

from nxdpp.doors.nxd.converter.head_order import HeadOrder, heads_of_model, heads_of_rank


def test_the_orders_of_the_drawing() -> None:
    trn1, trn2 = (HeadOrder(8, 2, ranks=4, multiplier=2, backend=backend) for backend in ("trn1", "trn2"))
    assert trn1.queries == [0, 1, 4, 5, 2, 3, 6, 7]
    assert trn2.queries == [0, 1, 2, 3, 4, 5, 6, 7]
    assert trn1.key_values("trn1") == [0, 1, 0, 1]
    assert trn1.key_values("trn2") == [0, 0, 1, 1]


def test_added_heads_are_zeros_and_last_of_their_group() -> None:
    order = HeadOrder(12, 2, ranks=8, multiplier=4, backend="trn1", pads=True)
    assert order.queries == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, None, None, None, None]
    whole = torch.arange(1.0, 25).view(24, 1)
    parts = [heads_of_rank(whole, order.queries, 12, 0, rank, 8) for rank in range(8)]
    assert parts[1].flatten().tolist() == [13, 14, 15, 16]
    assert not torch.cat(parts[6:]).any()
    assert torch.equal(heads_of_model(parts, order.queries, 12, 0), whole)
