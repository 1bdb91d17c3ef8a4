"""How long an operation takes, in FLOPs: those it does, or those the device could do while it moves the bytes.

::

    150 FLOPs a byte, 2048 tokens of 16 bits
    linear layer, 4096 to 4096           69 GFLOPs   moves 0.07 GB, worth 10 GFLOPs    work  69 G
    gradient of 128,256 embeddings        0 GFLOPs   writes 1.05 GB, worth 158         work 158 G

The model is the roofline of Williams, Waterman and Patterson (2009): an operation is bound by one of the two. It is
what makes embeddings, norms, softmax and the addition of gradients count, of which FLOPs know nothing.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.pipeline.cost.run_node import tensors_in

_aten = torch.ops.aten

# FLOPs for each byte: matrix products of 16 bits (A100 153, H200 206), of 32 (A100 10, H100 20), one core of a CPU.
_HALF_BALANCE = 150.0
_SINGLE_BALANCE = 15.0
_CPU_BALANCE = 10.0
_HALF_BYTES = 2

# They read, of their first argument, as much as they give.
_GATHERS = frozenset({_aten.embedding, _aten.gather, _aten.index, _aten.index_select})
_FREE = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view}
)


def machine_balance(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs that a device of this kind does on ``dtype`` while it moves one byte of its memory; a typical figure."""
    if device.type == "cpu":
        return _CPU_BALANCE
    return _HALF_BALANCE if dtype.itemsize <= _HALF_BYTES else _SINGLE_BALANCE


class WorkCounter(TorchDispatchMode):
    """Sums up the ``work`` of the operations that run under it, in FLOPs, for a device of that ``balance``.

    ``flops`` counts those of the same operations, and is entered before it.
    """

    def __init__(self, flops: FlopCounterMode, balance: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = 0.0
        self._flops = flops
        self._balance = balance

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and add what it takes."""
        before = self._flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flops = self._flops.get_total_flops() - before
        self.work += max(flops, self._balance * _bytes_moved(func, (args, kwargs), result))
        return result


def accumulation_work(parameter: torch.Tensor, balance: float) -> float:
    """The work of adding one microbatch's gradient of ``parameter`` to what others left: two reads and a write."""
    return 3 * balance * parameter.numel() * parameter.element_size() if parameter.requires_grad else 0.0


def _bytes_moved(func: Any, arguments: Any, result: Any) -> int:
    packet = getattr(func, "overloadpacket", None)
    if packet in _FREE or getattr(func, "is_view", False):
        return 0
    read, written = tensors_in(arguments), tensors_in(result)
    if not written:  # a question about metadata
        return 0
    if packet in _GATHERS:
        read = [*written, *read[1:]]
    return sum(map(_bytes, (*read, *written)))


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor has fewer bytes than elements.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
