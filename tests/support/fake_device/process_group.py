"""The backend "fccl": NCCL's rules between processes; gloo moves the bytes."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # public, not in __all__

NAME = "fccl"
# The timeout of the group's own watchdog counts.
_FOR_EVER = timedelta(days=1)


def register(native: Any) -> None:
    """Register the backend, and make it the one of the device type."""

    def create(options: Any, _: Any = None) -> Any:
        store, rank, size = options.store, options.group_rank, options.group_size
        ranks = list(options.global_ranks_in_group) or list(range(size))

        def connect(key: str, number: int, members: int) -> Any:
            return ProcessGroupGloo(PrefixStore(f"{NAME}/{key}", store), number, members, timeout=_FOR_EVER)

        milliseconds = int(options.timeout / timedelta(milliseconds=1))
        return native.create(rank, size, str(options.group_id), ranks, milliseconds, connect)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["fake"])
