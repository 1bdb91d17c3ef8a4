"""Copies with given strides, and the way of a tensor's strides over a boundary."""

import pytest
import torch

from nxdpp.devices.strides import copied, with_strides
from nxdpp.pipeline.p2p.layout import tensor_layout

BASE = torch.randn(2, 6, 4)
TENSORS = {
    "dense": BASE,
    "transposed": BASE.transpose(1, 2),
    "rows of a larger tensor": BASE[:, 1:3],
    "every other column": BASE[:, :, ::2],
    "expanded": BASE[:, :1].expand(2, 6, 4),
    "expanded, in two dimensions": BASE[0, 0].expand(3, 5, 4),
    "expanded, without the last": BASE[:, 0].unsqueeze(2).expand(2, 4, 7),
    "a single number": torch.randn(()),
    "one number expanded": torch.randn(()).expand(2, 3),
    "empty": torch.randn(0, 3),
    "a dimension of one with a stride of its own": BASE.as_strided((2, 1, 4), (24, 9, 1)),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_strides_cross_a_boundary(tensor: torch.Tensor) -> None:
    layout = tensor_layout(tensor)
    sent = layout.arrange(tensor)
    # Memory as a receive posts it before the layout is known.
    received = torch.empty(tensor.size())
    received.view(-1).copy_(sent.as_strided((sent.numel(),), (1,)))
    restored = layout.restore(received)
    assert torch.equal(restored, tensor)
    assert restored.stride() == tensor.stride()


def test_windows_become_a_plain_copy() -> None:
    windows = torch.arange(6.0).unfold(0, 3, 1)
    assert torch.equal(with_strides(windows, windows.stride()), windows)
    assert copied(windows).is_contiguous()
