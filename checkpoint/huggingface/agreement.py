"""What every rank found, known to all: so that all go on, or all raise."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def from_all_ranks(value: T) -> list[T]:
    """The ``value`` of every rank, by pickle, in the order of global ranks; collective over all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    if dist.get_backend() == "gloo":
        dist.all_gather_object(found, value)
        return found
    # Objects are in CPU memory, where NCCL cannot send from.
    group = dist.new_group(backend="gloo")
    dist.all_gather_object(found, value, group=group)
    dist.destroy_process_group(group)
    return found


def together(act: Callable[[], T], unless: str) -> T:
    """What ``act`` gives on this rank; where it raises on any rank, all raise. Collective over all ranks.

    A rank raises its own error. Others raise a ``ValueError`` for a ``ValueError``, a ``RuntimeError`` for anything
    else, with the message and the rank of the first, after ``unless``, which says what was not done.
    """
    own: Exception | None = None
    try:
        result = act()
    except Exception as error:
        own = error
    told = None if own is None else (isinstance(own, ValueError), f"{type(own).__name__}: {own}")
    failures = [(rank, failure) for rank, failure in enumerate(from_all_ranks(told)) if failure is not None]
    if own is not None:
        raise own
    if failures:
        rank, (is_value_error, message) = failures[0]
        raise (ValueError if is_value_error else RuntimeError)(f"{unless}: on rank {rank}, {message}")
    return result
