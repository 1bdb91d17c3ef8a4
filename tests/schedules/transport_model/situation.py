"""Backends and situations of a step, as the model of the transport tells them apart."""

from enum import Enum
from typing import NamedTuple


class Backend(Enum):
    """Semantics of a backend.

    Attributes:
        GLOO: the host computes. A message has a tag, and waits for no other.
        NCCL_LAZY: the communicators of two ranks are made by their first message (no ``device_id`` at the start).
        NCCL_EAGER: a group has one communicator, which runs all its messages in the order of the calls.
    """

    GLOO = "gloo"
    NCCL_LAZY = "nccl, lazy communicators"
    NCCL_EAGER = "nccl, eager communicators"


class Synchronises(Enum):
    """Actions in which a rank waits for the end of all that it has started on its device.

    ``cudaFree`` does so in the allocator's retry, and so do ``torch.cuda.synchronize``, the autotuning of kernels and
    the first use of a kernel. ``ALWAYS`` is after each single call, as with ``CUDA_LAUNCH_BLOCKING=1``.
    """

    NEVER = "never"
    FIRST_MICROBATCH = "in the first microbatch"
    ALWAYS = "at every call"


class Situation(NamedTuple):
    """Situation of a step.

    Attributes:
        first_step: ``True`` for the first step of a signature, with its metadata exchange and new communicators.
        asks: ``True`` if each forward waits for a value of its own, as ``mask.all()`` does.
        synchronises: the device-wide synchronisation.
        on_rank: the one rank that synchronises; ``None`` for all ranks.
        one_queue: ``True`` if a device runs all in the order of the calls, as with ``CUDA_DEVICE_MAX_CONNECTIONS=1``.
    """

    first_step: bool = False
    asks: bool = False
    synchronises: Synchronises = Synchronises.NEVER
    on_rank: int | None = None
    one_queue: bool = False

    def __str__(self) -> str:
        parts = ["first step" if self.first_step else "later step"]
        if self.asks:
            parts.append("forwards ask the device")
        if self.synchronises is not Synchronises.NEVER:
            where = "all ranks" if self.on_rank is None else f"rank {self.on_rank}"
            parts.append(f"{where} synchronise {self.synchronises.value}")
        if self.one_queue:
            parts.append("one hardware queue")
        return ", ".join(parts)
