"""Start of ``torch.distributed`` from the variables of the launcher, or as a world of one process."""

import os

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, though not in its __all__
    HashStore,
    Store,
)
from torch.distributed.rendezvous import rendezvous

from nxdpp.parallel_layers.start_store import store_of_start

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Number of processes: the launcher's WORLD_SIZE, or 1 for a plain ``python script.py``.

    Raises ``RuntimeError`` if some of the launcher's variables are missing.
    """
    if _is_alone():
        return 1
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"the environment has RANK or WORLD_SIZE but not {', '.join(missing)}: start the processes with "
            "torchrun, which sets them all, or unset them to run as one process"
        )
    return int(os.environ["WORLD_SIZE"])


def start_world() -> Store:
    """Start ``torch.distributed`` on NCCL if each local rank has a device, else on gloo; collective over all ranks.

    Returns the store of the world, under a prefix of this start.
    """
    size = world_size()
    backend = "nccl" if _has_device_for_each_local_rank(size) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(_local_rank())
    store, rank, size = _rendezvous()
    # torchrun's store outlives a world: without a prefix gloo would find the addresses of the previous world.
    store = store_of_start(store, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return store


def join_world() -> Store:
    """Return the store of the running world, under a prefix of this start; collective over all ranks."""
    return store_of_start(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


def local_device() -> torch.device:
    """Device of this rank for the backend of the running world: ``cuda:LOCAL_RANK`` on NCCL, else the CPU."""
    if "nccl" not in dist.get_backend_config() or not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        return torch.device("cuda", _local_rank())
    return torch.device("cuda", torch.cuda.current_device())


def _rendezvous() -> tuple[Store, int, int]:
    """A store shared by all ranks, this rank, and the world size."""
    if _is_alone():
        # A store in memory needs no port, so no other process can occupy it.
        return HashStore(), 0, 1
    store, rank, size = next(rendezvous("env://"))
    return store, rank, size


def _is_alone() -> bool:
    return not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE")


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _has_device_for_each_local_rank(size: int) -> bool:
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return dist.is_nccl_available() and torch.cuda.device_count() >= local_size
