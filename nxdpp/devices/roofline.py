"""Work of an operation: its FLOPs, or the FLOPs that the device could do while it moves the bytes, if more.

::

    150 FLOPs a byte, 2048 tokens of 16 bits
    linear layer, 4096 to 4096           69 GFLOPs   moves 0.07 GB, worth 10 GFLOPs    work  69 G
    gradient of 128,256 embeddings        0 GFLOPs   writes 1.05 GB, worth 158         work 158 G

This is the roofline model of Williams, Waterman and Patterson (2009). FLOPs give no cost to embeddings, norms, softmax
and the addition of gradients.
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.devices.live_bytes import tensors_in
from nxdpp.ground.torch_names import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    GROUPED_PRODUCT,
    STORAGE_ADDRESS,
    TorchDispatchMode,
)

_aten = torch.ops.aten

# FLOPs for each byte: matrix products of 16 bits (A100 153, H200 206), of 32 (A100 10, H100 20), one core of a CPU.
_HALF_BALANCE = 150.0
_SINGLE_BALANCE = 15.0
_CPU_BALANCE = 10.0
_HALF_BYTES = 2

# These read as many bytes of their first argument as they return.
_GATHERS = frozenset({_aten.embedding, _aten.gather, _aten.index, _aten.index_select})
_FREE = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})


def machine_balance(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs on ``dtype`` that a typical device of this type does while it moves one byte."""
    if device.type == "cpu":
        return _CPU_BALANCE
    return _HALF_BALANCE if dtype.itemsize <= _HALF_BYTES else _SINGLE_BALANCE


class WorkCounter(TorchDispatchMode):
    """Mode that adds up the work, in FLOPs, of the operations that run under it.

    Args:
        flops: counts the FLOPs of the same operations. The caller enters it before this mode.
        balance: FLOPs for each byte.
        least: work of each operation that moves bytes, added to its own.
    """

    def __init__(self, flops: FlopCounterMode, balance: float, least: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = 0.0
        self._flops = flops
        self._balance = balance
        self._least = least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and add its work."""
        before = self._flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flops = self._flops.get_total_flops() - before
        moved = _bytes_moved(func, (args, kwargs), result)
        self.work += max(flops, self._balance * moved) + (self._least if moved else 0.0)
        return result


def _bytes_moved(func: Any, arguments: Any, result: Any) -> int:
    packet = getattr(func, "overloadpacket", None)
    read, written = tensors_in(arguments), tensors_in(result)
    # Without results only metadata is read.
    if packet in _FREE or not written or _are_views(written, read):
        return 0
    if packet in _GATHERS:
        read = [*written, *read[1:]]
    return sum(map(_bytes, (*read, *written)))


def _are_views(results: list[torch.Tensor], arguments: list[torch.Tensor]) -> bool:
    """Return whether all ``results`` are new tensors over the memory of ``arguments``."""
    memories = {STORAGE_ADDRESS.of(each.untyped_storage()) for each in arguments}
    own = set(map(id, arguments))
    return all(id(each) not in own and STORAGE_ADDRESS.of(each.untyped_storage()) in memories for each in results)


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor has fewer bytes than elements.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    batch, heads, queries, width = query
    return 2 * int(batch * heads * queries * key[-2] * (width + value[-1]))


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    # The backward computes the scores again, then two products for each of the two of the forward.
    batch, heads, queries, width = query
    return 2 * int(batch * heads * queries * key[-2] * (3 * width + 2 * value[-1]))


def _grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    experts = left[0] if len(left) == len(right) == 3 else 1
    return 2 * int(experts * left[-2] * left[-1] * right[-1])


# FLOPs from the shapes of the arguments, for operations that torch's counter does not know.
FLOP_FORMULAS = {
    operation.found: formula
    for operation, formula in (
        (GROUPED_PRODUCT, _grouped_flops),
        (CPU_ATTENTION, _attention_flops),
        (CPU_ATTENTION_BACKWARD, _attention_backward_flops),
    )
    if operation.exists
}
