"""Choice of this rank's device and backend.

::

    CUDA absent                                   gloo, the CPU
    each local rank has a visible device          NCCL, cuda:LOCAL_RANK
    one visible device a task (srun, containers)  NCCL, cuda:0; the ranks verify that they share none
    CUDA present and unusable                     an error
    device="xla"                                  gloo, torch_xla's device of the process
"""

import logging
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.counted import counted
from nxdpp.devices import cuda, xla
from nxdpp.devices.kinds import device_of
from nxdpp.ranks.faults.waits import first_names
from nxdpp.ranks.launcher import Launcher
from nxdpp.ranks.store_exchange import StoreExchange

BACKENDS = ("gloo", "nccl")
_BACKEND_OF = {"cpu": "gloo", "cuda": "nccl", "xla": "gloo"}
_DEVICE_OF = {"gloo": "cpu", "nccl": "cuda"}
_DEVICES = "'cpu', 'cuda', for the CUDA device of the local rank, or 'xla', for torch_xla's device of the process"


def wanted_device(backend: str | None, device: str | None) -> str | None:
    """Return ``"cpu"``, ``"cuda"``, ``"xla"``, or ``None`` for CUDA where it is present, and else the CPU.

    Raises ``ValueError`` for an unknown name, and for a backend that does not serve the device.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r:.80} must be 'gloo', for the CPU, or 'nccl', for CUDA devices; without it nxdpp takes "
            f"nccl where each rank has a CUDA device, and else gloo"
        )
    if device is None:
        return None if backend is None else _DEVICE_OF[backend]
    if not isinstance(device, str) or device not in _BACKEND_OF:
        raise ValueError(f"device={device!r:.80} must be {_DEVICES}; without it nxdpp takes the device of the backend")
    if backend not in (None, _BACKEND_OF[device]):
        raise ValueError(
            f"backend={backend!r} does not serve device={device!r}, which communicates over {_BACKEND_OF[device]}: "
            f"leave backend out, or give backend={_BACKEND_OF[device]!r}"
        )
    return device


def backend_of(device: str) -> str:
    """Return the backend that serves the device of a type, ``"gloo"`` or ``"nccl"``."""
    return _BACKEND_OF[device]


def written(backend: str | None, device: str | None) -> str:
    """Return the argument of the two that asks for the device, as a caller writes it."""
    return f"backend={backend!r}" if device is None else f"device={device!r}"


_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_REMEDY = "or give initialize_model_parallel(backend='gloo'), which trains on the CPU"


def choose(launcher: Launcher, backend: str | None, kind: str | None = None) -> torch.device:
    """Return this rank's device: a CUDA device for NCCL, the CPU or an XLA device for gloo.

    ``backend=None`` is NCCL where CUDA is present, ``kind=None`` the device of ``backend``. Raises ``ValueError`` for
    unknown names, a backend that does not serve the device, or CUDA where it is absent. Raises ``RuntimeError`` where
    CUDA is present, and this rank cannot use a device of its own, and for XLA without a torch_xla and a PJRT device
    that can be used.
    """
    wanted = wanted_device(backend, kind)
    if wanted == "xla":
        return xla.start(launcher.local_rank, launcher.local_world_size)
    if wanted == "cpu":
        return _CPU
    found = cuda.find()
    if found.problem is not None:
        raise RuntimeError(f"{found.problem}. Repair that (nvidia-smi must list the devices), {_REMEDY}.")
    if found.absent is not None:
        if wanted == "cuda":
            remedy = "backend='gloo'" if kind is None else "device='cpu'"
            raise ValueError(f"{written(backend, kind)} needs a CUDA device, and {found.absent}. Use {remedy}.")
        if not found.is_chosen and launcher.local_rank in (None, 0):
            _logger.warning("%s: the ranks train on the CPU, over gloo", found.absent)
        return _CPU
    if not dist.is_nccl_available():
        raise RuntimeError(
            f"{counted(found.count, 'CUDA device is', 'CUDA devices are')} visible, and this torch is built without "
            f"NCCL. Install one with NCCL, {_REMEDY}."
        )
    return torch.device("cuda", _index(launcher, found.count))


def _index(launcher: Launcher, visible: int) -> int:
    """Return the index of this rank's device among the visible ones."""
    local_rank, local_size = launcher.local_rank, launcher.local_world_size
    if visible == 1:
        return 0
    if local_rank is None:
        raise RuntimeError(
            f"{counted(visible, 'CUDA device is', 'CUDA devices are')} visible, and nothing tells which of them is "
            f"that of rank {launcher.rank}: export LOCAL_RANK, the number of the process on its host, as torchrun "
            f"does; {_REMEDY}."
        )
    if max(local_rank + 1, local_size or 1) > visible:
        ranks = f"local rank {local_rank}" if local_size is None else counted(local_size, "local rank")
        raise RuntimeError(
            f"{counted(visible, 'CUDA device is', 'CUDA devices are')} visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}) for {ranks}, started by "
            f"{launcher.name}: start at most {counted(visible, 'process')} on a host (torchrun --nproc-per-node "
            f"{visible}); or give each task one device (srun --gpus-per-task=1); {_REMEDY}."
        )
    return local_rank


def start_device(device: torch.device) -> str:
    """Make a CUDA device the current one, and return its identity; raises ``RuntimeError`` if it cannot be used."""
    try:
        return cuda.start(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise RuntimeError(
            f"{device} of host {socket.gethostname()} is visible and cannot be used: {reason}. Free or repair it, or "
            f"leave it out of CUDA_VISIBLE_DEVICES; {_REMEDY}."
        ) from error


def verify_own_devices(store: Store, rank: int, world_size: int, identity: str) -> None:
    """Raise ``RuntimeError`` on each rank if two ranks have the same device; collective over all ranks.

    ``identity`` is of this rank's device on its host.
    """
    here = f"{identity} of host {socket.gethostname()}"
    devices: list[str] = StoreExchange(store, rank, world_size, "devices").gather(here)
    for other, device in enumerate(devices):
        if (owner := devices.index(device)) != other:
            raise RuntimeError(
                f"ranks {owner} and {other} both see {device} as their first device, and NCCL needs one for each. "
                f"Start at most as many processes on a host as it has devices; or give each task its own (srun "
                f"--gpus-per-task=1); {_REMEDY}."
            )


def verify_same_kind(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """Raise ``RuntimeError`` on all ranks unless they have devices of one kind; collective over all ranks."""
    kinds: list[str] = StoreExchange(store, rank, world_size, "device kinds").gather(device_of(device).kind)
    if len(set(kinds)) == 1:
        return
    ranks = {kind: [rank for rank, found in enumerate(kinds) if found == kind] for kind in dict.fromkeys(kinds)}
    with_kind = ", ".join(f"{kind} on {first_names(those)}" for kind, those in ranks.items())
    raise RuntimeError(
        f"the ranks have devices of different kinds: {with_kind}. Give all ranks the same backend= and device= of "
        f"initialize_model_parallel, and start them on hosts with the same devices and the same PJRT_DEVICE."
    )


def check_world(backend: str | None, kind: str | None) -> None:
    """Raise ``ValueError`` if the running world, which the caller has started, does not serve the wanted device."""
    config = dist.get_backend_config()
    if "xla" in config:
        raise ValueError(
            f"torch.distributed already runs on {config}, whose collectives are not those of nxdpp: leave "
            f"init_process_group('xla') out, or write 'gloo' there, and give initialize_model_parallel(device='xla')"
        )
    wanted = wanted_device(backend, kind)
    needed = None if wanted is None else backend_of(wanted)
    if needed is not None and needed not in config:
        raise ValueError(
            f"{written(backend, kind)}, but torch.distributed already runs on {config}: leave {_name(kind)} out, or "
            f"start it with init_process_group({needed!r}), or let initialize_model_parallel start it"
        )
    if wanted == "xla" and dist.get_backend() != dist.Backend.GLOO:
        raise ValueError(
            f"device='xla' needs a world of gloo alone, and torch.distributed already runs on {config}, started as "
            f"{dist.get_backend()!r}: start it with init_process_group('gloo'), or let initialize_model_parallel start "
            f"it"
        )


def device_of_world(launcher: Launcher, backend: str | None, kind: str | None = None) -> torch.device:
    """Return this rank's device in a world that the caller has started; a CUDA device becomes the current one.

    The device of the world's start comes first (``device_id``), then one that was made current. Raises ``ValueError``
    for a backend or a device that the world does not serve, ``RuntimeError`` as ``choose``.
    """
    check_world(backend, kind)
    wanted, config = wanted_device(backend, kind), dist.get_backend_config()
    if wanted == "xla":
        return choose(launcher, backend, kind)
    if wanted == "cpu" or "nccl" not in config:
        return _CPU
    world = dist.group.WORLD
    assert world is not None
    device: torch.device | None = world.bound_device_id
    if device is None and cuda.find().count and cuda.current_index():
        device = torch.device("cuda", cuda.current_index())
    if device is None:
        # Without a backend's name torch starts both, also where there is no CUDA.
        either = wanted is None and "gloo" in config
        device = choose(launcher, None if either or kind is not None else "nccl", kind)
    if device.type == "cuda":
        start_device(device)
    return device


def _name(kind: str | None) -> str:
    return "backend" if kind is None else "device"
