"""Copies of parameters that autocast makes in the first microbatch, and keeps until its outermost block ends."""

from typing import Any

import torch

from nxdpp.ground.torch_names import TorchDispatchMode
from nxdpp.tracing.costs.run_node import NodeRun, memory_of
from nxdpp.tracing.modules import listings


def cached_casts(run: NodeRun) -> list[torch.Tensor]:
    """Return the copies of parameters of ``run`` that autocast keeps; none outside of autocast.

    ``run`` has fake tensors. A copy that a second forward makes again is not kept, such as one of ``weight.to(dtype)``.
    """
    if run.module is None or not torch.is_autocast_enabled("cpu"):
        return []
    memories = {memory_of(parameter) for parameter in listings.parameters(run.module)}
    first, again = _Casts(memories), _Casts(memories)
    with torch.enable_grad():
        with first:
            run.forward()
        with again:
            run.forward()
    return [copy for source, copy in first.made.items() if source not in again.made]


class _Casts(TorchDispatchMode):
    """Mode that collects the copies, of a different dtype, of the memory of parameters."""

    def __init__(self, memories: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, torch.Tensor] = {}
        self._memories = memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and note its result if it copies a parameter."""
        result = func(*args, **(kwargs or {}))
        source: Any = args[0] if args else None
        if _is_cast(source, result) and memory_of(source) in self._memories:
            self.made[memory_of(source)] = result
        return result


def _is_cast(source: Any, result: Any) -> bool:
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return result.shape == source.shape and result.is_floating_point() and result.dtype != source.dtype
