"""The layout of a value is enough to build it again from its tensors."""

import pytest
import torch

from nxdpp.pipeline.p2p.layout import check_layout, layout_of, shared_memory

A = torch.randn(2, 3)
B = torch.randn(4, dtype=torch.float64, requires_grad=True)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4).transpose(0, 2),
        torch.randn(4, 6)[:, ::2],
        torch.randn(1, 3).expand(5, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.randn(0, 3),
    ],
)
def test_memory_is_dense_and_holds_the_same_numbers(tensor: torch.Tensor) -> None:
    (layout,) = layout_of(tensor).tensors

    arranged = layout.arrange(tensor)
    buffer = layout.allocate(CPU)

    assert torch.equal(arranged, tensor)
    assert arranged.stride() == buffer.stride() == layout.stride
    assert arranged.untyped_storage().nbytes() >= arranged.numel() * arranged.element_size()
    assert buffer.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_another_layout_is_refused_and_other_strides_pass() -> None:
    check_layout("hidden", (torch.randn(3, 2).T, 1), layout_of((A, 1)))
    for value in (torch.randn(2, 4), A.double(), (A, A), None):
        with pytest.raises(RuntimeError, match=r"the value hidden, .*, is now .*it was float32\[2, 3\]"):
            check_layout("hidden", value, layout_of(A))
    with pytest.raises(RuntimeError, match=r"is now float32\[2, 3\], 1; .* it was float32\[2, 3\], 2"):
        check_layout("hidden", (A, 1), layout_of((A, 2)))


def test_an_unexpected_gradient_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"hidden, .* now requires a gradient .* Call refresh\(\) on every rank"):
        check_layout("hidden", A.clone().requires_grad_(), layout_of(A))
    check_layout("hidden", B.detach(), layout_of(B))


def test_a_sparse_tensor_is_refused_and_a_dense_one_passes() -> None:
    with pytest.raises(TypeError, match=r"torch.sparse_coo cannot be sent .* dense \(.to_dense\(\)\)"):
        layout_of((A, A.to_sparse()))
    assert layout_of(A.to_sparse().to_dense()) == layout_of(A)
    assert shared_memory([A.to_sparse()]) == set()
