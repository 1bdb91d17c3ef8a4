"""Arguments that an operation changes, from its schema."""

import torch

from nxdpp.initialization.tape import written_tensors

aten = torch.ops.aten


def test_written_arguments_by_position_and_by_name() -> None:
    one, two = torch.ones(2), torch.ones(2)

    assert written_tensors(aten.add.Tensor, (one, two), {}) == []
    assert [id(t) for t in written_tensors(aten.add_.Tensor, (one, two), {})] == [id(one)]
    assert [id(t) for t in written_tensors(aten.add.out, (one, one), {"out": two})] == [id(two)]
    assert [id(t) for t in written_tensors(aten._foreach_zero_.default, ([one, two],), {})] == [id(one), id(two)]
