"""How this process was started, and starting ``torch.distributed`` by that."""

import os
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, though not in its __all__
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.rendezvous import rendezvous

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_worlds = count()
"""How many worlds this process has started, the same number on all ranks."""


def world_size() -> int:
    """How many processes the launcher started: its WORLD_SIZE, or 1 for a plain ``python script.py``.

    Raises ``RuntimeError`` if the launcher's variables are there only in part.
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


def start_world() -> None:
    """Starts ``torch.distributed``, collective over all ranks: NCCL with a device a local rank, else gloo."""
    size = world_size()
    backend = "nccl" if _has_device_for_each_local_rank(size) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(_local_rank())
    store, rank, size = _rendezvous()
    # torchrun's store outlives a world, and gloo would find the last one's addresses in it.
    store = PrefixStore(f"nxdpp_world_{next(_worlds)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def local_device() -> torch.device:
    """The device of the running world's backend for this rank: ``cuda:LOCAL_RANK`` on NCCL, else the CPU."""
    if "nccl" not in dist.get_backend_config() or not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        return torch.device("cuda", _local_rank())
    return torch.device("cuda", torch.cuda.current_device())


def _rendezvous() -> tuple[Store, int, int]:
    """A store that all ranks share, this rank and the size of the world."""
    if _is_alone():
        # A store in memory: a world of one needs no port, so it cannot find one taken.
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
