"""Choice of this rank's device and backend.

::

    no accelerator                                gloo, the CPU
    each local rank has a visible device          the backend of its type (NCCL for CUDA), cuda:LOCAL_RANK
    one visible device a task (srun, containers)  the same, cuda:0; the ranks verify that they share none
    CUDA present and unusable                     an error
    a type without a backend of its own           gloo, through host memory; only by name (device="mps")
    device="xla"                                  gloo, torch_xla's device of the process
"""

import logging
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.counted import counted
from nxdpp.devices import CUDA, accelerator, cuda, xla
from nxdpp.devices.kinds import device_of, kind_of
from nxdpp.ranks.faults.waits import first_names
from nxdpp.ranks.launcher import Launcher
from nxdpp.ranks.store_exchange import StoreExchange

_DEVICES = (
    "'cpu', 'cuda', 'xpu' or another type of accelerator that torch knows, for the device of the local rank, or 'xla', "
    "for torch_xla's device of the process"
)


def wanted_device(backend: str | None, device: str | None) -> str | None:
    """Return a type of device, or ``None`` for the accelerator where one is present, and else the CPU.

    Raises ``ValueError`` for an unknown name, and for a backend that does not serve the device.
    """
    devices = {own: kind for kind, own in dist.Backend.default_device_backend_map.items() if own != "gloo"}
    if backend is not None and backend not in ("gloo", *devices):
        others = "".join(f", {own!r} for {kind}" for own, kind in devices.items() if kind != CUDA)
        raise ValueError(
            f"backend={backend!r:.80} must be 'gloo', for the CPU, or 'nccl', for CUDA devices{others}; without it "
            f"nxdpp takes that of each rank's accelerator, and else gloo"
        )
    if device is None:
        return None if backend is None else devices.get(backend, "cpu")
    if not isinstance(device, str) or not _is_type(device):
        raise ValueError(f"device={device!r:.80} must be {_DEVICES}; without it nxdpp takes the device of the backend")
    own = kind_of(device).backend
    if backend not in (None, own):
        raise ValueError(
            f"backend={backend!r} does not serve device={device!r}, which communicates over {own}: leave backend out, "
            f"or give backend={own!r}"
        )
    return device


def _is_type(device: str) -> bool:
    try:
        return device != "meta" and torch.device(device).type == device
    except RuntimeError:
        return False


def written(backend: str | None, device: str | None) -> str:
    """Return the argument of the two that asks for the device, as a caller writes it."""
    return f"backend={backend!r}" if device is None else f"device={device!r}"


_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_REMEDY = "or give initialize_model_parallel(backend='gloo'), which trains on the CPU"


def choose(launcher: Launcher, backend: str | None, kind: str | None = None) -> torch.device:
    """Return this rank's device.

    Without both arguments it is the accelerator whose type has a backend of its own, CUDA's first, or else the CPU;
    ``kind=None`` is the device of ``backend``. Raises ``ValueError`` for unknown names, a backend that does not serve
    the device, or an accelerator where it is absent. Raises ``RuntimeError`` where one is present, and this rank cannot
    use a device of its own, and for XLA without a torch_xla and a PJRT device that can be used.
    """
    wanted = wanted_device(backend, kind)
    if wanted == "xla":
        return xla.start(launcher.local_rank, launcher.local_world_size)
    if wanted == "cpu":
        return _CPU
    if wanted not in (None, CUDA):
        return _accelerator(launcher, wanted, written(backend, kind))
    found = cuda.find()
    if found.problem is not None:
        raise RuntimeError(f"{found.problem}. Repair that (nvidia-smi must list the devices), {_REMEDY}.")
    if found.absent is not None:
        if wanted == CUDA:
            remedy = "backend='gloo'" if kind is None else "device='cpu'"
            raise ValueError(f"{written(backend, kind)} needs a CUDA device, and {found.absent}. Use {remedy}.")
        for other in _present():
            return _accelerator(launcher, other, written(backend, other))
        if not found.is_chosen and launcher.local_rank in (None, 0):
            _logger.warning("%s: the ranks train on the CPU, over gloo", found.absent)
        return _CPU
    if not dist.is_nccl_available():
        raise RuntimeError(
            f"{counted(found.count, 'CUDA device is', 'CUDA devices are')} visible, and this torch is built without "
            f"NCCL. Install one with NCCL, {_REMEDY}."
        )
    shown = f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
    return torch.device(CUDA, _index(launcher, found.count, "CUDA", shown))


def _accelerator(launcher: Launcher, kind: str, argument: str) -> torch.device:
    """Return this rank's device of a type other than CUDA."""
    visible = accelerator.count(kind)
    if not visible:
        raise ValueError(
            f"{argument} needs a device of the type {kind!r}, and torch finds none. Import the package that registers "
            f"the type (torch_npu for 'npu'), repair its driver, or use device='cpu'."
        )
    if kind_of(kind).backend == "gloo" and launcher.local_rank in (None, 0):
        _logger.warning(
            "device=%r: torch.distributed has no backend for this type: its tensors go over gloo, through host memory",
            kind,
        )
    return torch.device(kind, _index(launcher, visible, kind))


def _index(launcher: Launcher, visible: int, kind: str, shown: str = "") -> int:
    """Return the index of this rank's device among the visible ones."""
    local_rank, local_size = launcher.local_rank, launcher.local_world_size
    if visible == 1:
        return 0
    devices = counted(visible, f"{kind} device is", f"{kind} devices are")
    if local_rank is None:
        raise RuntimeError(
            f"{devices} visible, and nothing tells which of them is that of rank {launcher.rank}: export LOCAL_RANK, "
            f"the number of the process on its host, as torchrun does; {_REMEDY}."
        )
    if max(local_rank + 1, local_size or 1) > visible:
        ranks = f"local rank {local_rank}" if local_size is None else counted(local_size, "local rank")
        raise RuntimeError(
            f"{devices} visible{shown} for {ranks}, started by {launcher.name}: start at most "
            f"{counted(visible, 'process')} on a host (torchrun --nproc-per-node {visible}); or give each task one "
            f"device (srun --gpus-per-task=1); {_REMEDY}."
        )
    return local_rank


def start_device(device: torch.device) -> str | None:
    """Make an accelerator the current one, and return its identity, if its type tells one.

    Raises ``RuntimeError`` if it cannot be used.
    """
    try:
        return accelerator.start(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise RuntimeError(
            f"{device} of host {socket.gethostname()} is visible and cannot be used: {reason}. Free or repair it, or "
            f"hide it (CUDA_VISIBLE_DEVICES); {_REMEDY}."
        ) from error


def verify_own_devices(store: Store, rank: int, world_size: int, identity: str | None) -> None:
    """Raise ``RuntimeError`` on each rank if two ranks have the same device; collective over all ranks.

    ``identity`` is of this rank's device on its host, ``None`` where it is unknown.
    """
    here = f"{f'rank {rank}' if identity is None else identity} of host {socket.gethostname()}"
    devices: list[str] = StoreExchange(store, rank, world_size, "devices").gather(here)
    for other, device in enumerate(devices):
        if (owner := devices.index(device)) != other:
            raise RuntimeError(
                f"ranks {owner} and {other} both see {device} as their first device, and each needs its own. "
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
    needed = None if wanted is None else kind_of(wanted).backend
    if needed is not None and needed not in config:
        argument = "backend" if kind is None else "device"
        raise ValueError(
            f"{written(backend, kind)}, but torch.distributed already runs on {config}: leave {argument} out, or "
            f"start it with init_process_group({needed!r}), or let initialize_model_parallel start it"
        )
    if wanted == "xla" and dist.get_backend() != dist.Backend.GLOO:
        raise ValueError(
            f"device='xla' needs a world of gloo alone, and torch.distributed already runs on {config}, started as "
            f"{dist.get_backend()!r}: start it with init_process_group('gloo'), or let initialize_model_parallel start "
            f"it"
        )


def device_of_world(launcher: Launcher, backend: str | None, kind: str | None = None) -> torch.device:
    """Return this rank's device in a world that the caller has started; an accelerator becomes the current one.

    The device of the world's start comes first (``device_id``), then one that was made current. Raises ``ValueError``
    for a backend or a device that the world does not serve, ``RuntimeError`` as ``choose``.
    """
    check_world(backend, kind)
    wanted, config = wanted_device(backend, kind), dist.get_backend_config()
    if wanted == "xla":
        return choose(launcher, backend, kind)
    of_world = wanted or next(filter(lambda each: kind_of(each).backend in config, (CUDA, *_present())), "cpu")
    if of_world == "cpu":
        return _CPU
    world = dist.group.WORLD
    assert world is not None
    device: torch.device | None = world.bound_device_id
    if device is None and accelerator.count(of_world) and accelerator.current_index():
        device = torch.device(of_world, accelerator.current_index())
    if device is None:
        # Without a backend's name torch starts both, also where there is no CUDA.
        either = wanted is None and "gloo" in config
        device = choose(launcher, None if either or kind is not None else kind_of(of_world).backend, kind)
    if device.type != "cpu":
        start_device(device)
    return device


def _present() -> list[str]:
    """The type of this machine's accelerator, if it has a backend of its own."""
    found = accelerator.present()
    return [] if found is None or kind_of(found).backend == "gloo" else [found]
