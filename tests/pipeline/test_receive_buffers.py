"""Memory is used again once nothing holds it, however it is held."""

import torch

from nxdpp.pipeline.layout import layout_of
from nxdpp.pipeline.receive_buffers import ReceiveBuffers

(LAYOUT,) = layout_of(torch.empty(4, 6).t()).tensors


def test_a_buffer_that_is_read_is_not_given_again() -> None:
    buffers = ReceiveBuffers()
    first = buffers.take(LAYOUT)
    assert first.size() == LAYOUT.size
    assert first.stride() == LAYOUT.stride
    view = first.detach()[1:]
    assert buffers.take(LAYOUT).data_ptr() != first.data_ptr()
    del view


def test_a_buffer_that_autograd_has_saved_is_not_given_again() -> None:
    buffers = ReceiveBuffers()
    first = buffers.take(LAYOUT)
    product = first.detach() * torch.ones((), requires_grad=True)
    assert buffers.take(LAYOUT) is not first
    del product
    assert buffers.take(LAYOUT) is first


def test_free_buffers_are_used_again_the_oldest_first() -> None:
    buffers = ReceiveBuffers()
    first = buffers.take(LAYOUT)
    held = first.detach()
    second = buffers.take(LAYOUT)
    del held
    assert buffers.take(LAYOUT) is first
    assert buffers.take(LAYOUT) is second


def test_other_layouts_have_buffers_of_their_own() -> None:
    buffers = ReceiveBuffers()
    (other,) = layout_of(torch.empty(4, 6)).tensors
    first = buffers.take(LAYOUT)
    assert buffers.take(other) is not first
    buffers.clear()
    assert buffers.take(LAYOUT) is not first
