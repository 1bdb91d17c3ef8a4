"""Start of ``torch.distributed`` from the variables of the launcher, or as a world of one process."""

import os
import socket
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in its __all__
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from nxdpp.devices.kinds import has_streams, kind_of
from nxdpp.ground.torch_names import DEFAULT_STORE
from nxdpp.ranks.device_choice import (
    check_world,
    choose,
    device_of_world,
    start_device,
    verify_own_devices,
    verify_same_kind,
    wanted_device,
)
from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.faults.watch_store import launcher_has_store
from nxdpp.ranks.launcher import Launcher, launcher
from nxdpp.ranks.start_store import store_of_start

_LOOPBACK = "lo"


def world_size() -> int:
    """Number of processes from the launcher, 1 without one; ``RuntimeError`` if it lacks some of its variables."""
    return launcher().world_size


def check_device(backend: str | None, kind: str | None) -> None:
    """Raise ``ValueError`` for arguments that do not fit each other, or a world that the caller has started."""
    wanted_device(backend, kind)
    if dist.is_initialized():
        check_world(backend, kind)


def choose_device(backend: str | None, kind: str | None = None) -> torch.device:
    """Return this rank's device in the running world, or the one to start; raises as ``device_choice.choose``."""
    if dist.is_initialized():
        return device_of_world(launcher(starts_world=False), backend, kind)
    return choose(launcher(), backend, kind)


def start_world(device: torch.device, timeouts: Timeouts) -> Store:
    """Start ``torch.distributed`` on the backend of the device; collective over all ranks.

    Returns the store of the world, under a prefix of this start. Raises ``RuntimeError`` on all ranks for devices of
    different kinds. An operation may take longer than all ``timeouts``: torch's own limit for NCCL is 10 minutes.
    """
    started_by = launcher()
    if started_by.is_on_one_host and not started_by.is_alone:
        _listen_on_loopback()
    backend = kind_of(device.type).backend
    identity = start_device(device) if has_streams(device.type) else None
    store, rank, size = _rendezvous(started_by)
    # The store outlives a world: without a prefix gloo would find the addresses of the previous world.
    store = store_of_start(store, rank, size)
    verify_same_kind(store, rank, size, device)
    if backend != "gloo":
        verify_own_devices(store, rank, size, identity)
    limit = timeouts.of_operations
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return store


def join_world(device: torch.device) -> Store:
    """Return the store of the running world, under a prefix of this start; collective over all ranks.

    Raises ``RuntimeError`` on all ranks for devices of different kinds.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = store_of_start(DEFAULT_STORE(), rank, size)
    verify_same_kind(store, rank, size, device)
    return store


def _listen_on_loopback() -> None:
    """Let gloo listen where no other host can connect, unless the user has chosen a device."""
    if any(name == _LOOPBACK for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)


def _rendezvous(started_by: Launcher) -> tuple[Store, int, int]:
    """A store shared by all ranks, this rank, and the world size."""
    if started_by.is_alone:
        # A store in memory needs no port, so no other process can occupy it.
        return HashStore(), 0, 1
    rank, size = started_by.rank, started_by.world_size
    if launcher_has_store():
        store, rank, size = next(rendezvous("env://", rank, size))
        return store, rank, size
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Torch's own call waits for all ranks here, without a word about the missing ones.
    if rank > 0:
        return TCPStore(host, port, timeout=default_pg_timeout, wait_for_workers=False), rank, size
    return _hosted_store(host, port, started_by.is_on_one_host), rank, size


@cache
def _hosted_store(host: str, port: int, on_loopback: bool) -> Store:
    """The store that this process hosts until its end, as torchrun's agent does.

    A next start uses it again. A store that ended with a start would lose ranks that are ahead and ask it already, and
    a model of that start still holds it, and so the port.
    """
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=default_pg_timeout,
        wait_for_workers=False,
        # Torch then finds the server of this port in this process, also for a world that the user starts.
        multi_tenant=True,
        master_listen_fd=_listening(host, port) if on_loopback else None,
    )


def _listening(host: str, port: int) -> int | None:
    """A socket that listens on a loopback address; ``None`` where torch itself listens, or tells why it cannot."""
    try:
        # torch may know another host, as an address of IPv6, and has the port where a world of the user held it.
        address = socket.gethostbyname(host)
        listening = socket.create_server((address, port)) if address.startswith("127.") else None
    except OSError:
        return None
    # The store closes it.
    return listening.detach() if listening is not None else None
