"""Tensors without values: buffers that were replaced are not kept."""

import weakref

import torch
from torch import nn

from nxdpp.doors.nnscaler.unwritten import UnwrittenTensors


def test_marked_buffers_are_not_kept() -> None:
    part = nn.Module()
    part.register_buffer("shift", torch.zeros(3), persistent=False)
    tensors = UnwrittenTensors(part)
    tensors.leave_all()
    old = weakref.ref(part.get_buffer("shift"))
    part.shift = torch.ones(3)
    tensors.mark_unsaved()
    assert old() is None
