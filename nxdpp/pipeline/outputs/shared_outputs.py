"""Values of the last stage, sent to all ranks of the pipeline.

::

    rank of the last stage                          other ranks
    layouts, small tensors, as one message    ───▶  values with memory for the other tensors
    each large tensor, from host memory       ───▶  its memory
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.p2p.layout import TensorLayout, ValueLayout, layout_of, tensors_of
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import broadcast_value

_NAME = "outputs of the pipeline"
# Bytes of a tensor that is sent with the layouts.
_SMALL = 2**14


def shared_outputs(values: Sequence[Any] | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return ``values`` of the rank ``source`` on every rank of ``group``; collective over it.

    Args:
        values: tensors, numbers, and nested tuples, lists, dicts and dataclasses of them; ignored on other ranks.
        source: number in ``group`` of the rank that has them.
        group: ranks of a pipeline, for CPU tensors.
        device: of the tensors on this rank.

    Raises:
        TypeError: for another object that holds tensors.
    """
    if dist.get_world_size(group) == 1:
        return list(values or ())
    if dist.get_rank(group) == source:
        own = list(values or ())
        _send(own, source, group, device)
        return own
    return _receive(source, group, device)


def _send(values: list[Any], source: int, group: dist.ProcessGroup, device: torch.device) -> None:
    layout = layout_of(values)
    tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors_of(values)]
    on_host = device_of(device).to_host_together(tensors)()
    in_memory = [_bytes(own.arrange(tensor)) for own, tensor in zip(layout.tensors, on_host, strict=True)]
    small = [raw.numpy().tobytes() if raw.numel() <= _SMALL else None for raw in in_memory]
    broadcast_value((layout.skeleton, small), group, source, _NAME)
    for raw, content in zip(in_memory, small, strict=True):
        if content is None:
            _broadcast(raw, source, group)


def _receive(source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    received: Any = broadcast_value(None, group, source, _NAME)
    skeleton, small = received
    layout = ValueLayout(skeleton)
    tensors = []
    for tensor_layout, content in zip(layout.tensors, small, strict=True):
        memory = tensor_layout.allocate(torch.device("cpu"))
        raw = _bytes(memory)
        if content is None:
            _broadcast(raw, source, group)
        elif content:
            raw.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        tensors.append(_on(device, memory, tensor_layout))
    return layout.build(tensors)


def _broadcast(message: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    with Wait(_NAME, group):
        dist.broadcast(message, group=group, group_src=source)


def _on(device: torch.device, memory: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    return layout.restore(memory if device.type == "cpu" else device_of(device).from_host(memory))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the bytes of a dense tensor (n,), in the order of its memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
