"""Ranks of a test whose device is PJRT's CPU device."""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.run_ranks import run_ranks

# Compilation of a stage takes a quarter of the time.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ENVIRONMENT = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": _FLAGS}


def run_xla_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 200.0) -> list[Any]:
    """Return the results of ``function(rank, *args)`` in ``world_size`` processes of one thread each, as ``run_ranks``.

    They have PJRT's CPU device: ``function`` calls ``initialize_model_parallel(device="xla")``. A tensor of that device
    that reaches gloo raises.
    """
    return run_ranks(world_size, _on_xla, function, *args, timeout=timeout)


def _on_xla(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    os.environ |= ENVIRONMENT
    return function(rank, *args)


@contextmanager
def compilations(into: list[int]) -> Iterator[None]:
    """Append the number of graphs that this process compiles in the block."""
    before = compiled()
    yield
    into.append(compiled() - before)


def compiled() -> int:
    """Return the number of graphs that this process has compiled."""
    return _count("CompileTime")


def _count(metric: str) -> int:
    if "PJRT_DEVICE" not in os.environ:
        return 0
    from torch_xla.debug import metrics

    found = metrics.metric_data(metric)
    return int(found[0]) if found else 0


@contextmanager
def executions(into: list[int]) -> Iterator[None]:
    """Append the number of graphs that this process runs in the block."""
    before = _count("ExecuteTime")
    yield
    into.append(_count("ExecuteTime") - before)


def recorded_bytes() -> int:
    """Return the bytes of the tensors that the next submit computes and keeps, and of those that it reads."""
    import torch_xla

    report = torch_xla._XLAC._xla_tensors_report(0, str(torch_xla.device()))
    sizes = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "pred": 1}
    found = re.findall(r"^Tensor: id=\d+, shape=(\w+)\[([\d,]*)\]", report, re.M)
    return sum(sizes[dtype] * math.prod(int(size) for size in shape.split(",") if size) for dtype, shape in found)
