"""What only one rank can find out, on all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from nxdpp.parallel_layers import parallel_state

T = TypeVar("T")


def from_first_rank(make: Callable[[], T]) -> T:
    """What ``make`` gives on global rank 0, on every rank, by pickle; collective over all ranks.

    Where it raises there, rank 0 raises the same, and every other rank a ``ValueError`` for a ``ValueError``, a
    ``RuntimeError`` for anything else, with its message. In the debug mode, ``RuntimeError``.
    """
    parallel_state.refuse_in_debug("what rank 0 tells all ranks")
    error: Exception | None = None
    told: list[Any] = [None, None, False]
    if dist.get_rank() == 0:
        try:
            told = [make(), None, False]
        except Exception as raised:
            error = raised
            told = [None, f"{type(raised).__name__}: {raised}", isinstance(raised, ValueError)]
    _broadcast(told)
    if error is not None:
        raise error
    value, message, is_value_error = told
    if message is not None:
        raise (ValueError if is_value_error else RuntimeError)(f"on rank 0, {message}")
    made: T = value
    return made


def _broadcast(told: list[Any]) -> None:
    if dist.get_backend() == "gloo":
        dist.broadcast_object_list(told, src=0)
        return
    # A wait of minutes is for gloo: NCCL would keep every device busy meanwhile.
    group = dist.new_group(backend="gloo")
    dist.broadcast_object_list(told, src=0, group=group)
    dist.destroy_process_group(group)
