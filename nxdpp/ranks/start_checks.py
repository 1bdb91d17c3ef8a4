"""Checks of the arguments of ``initialize_model_parallel``, before anything is started."""

import numbers
import os
from pathlib import Path

from nxdpp.counted import counted
from nxdpp.ranks.device_choice import wanted_device, written
from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.process_groups import ProcessGroups
from nxdpp.ranks.rank_mesh import RankMesh


def check_sizes(tensor: int, pipeline: int, world_size: int) -> None:
    """Raise ``ValueError`` for sizes below 1 or that do not divide the world, ``TypeError`` for no whole number."""
    for name, size in (("tensor_model_parallel_size", tensor), ("pipeline_model_parallel_size", pipeline)):
        _check_whole(name, size)
        if size < 1:
            raise ValueError(f"{name}={size} must be a whole number of at least 1.")
    if world_size % (tensor * pipeline):
        raise ValueError(
            f"a world of {counted(world_size, 'rank')} does not divide into model replicas of "
            f"{tensor * pipeline} (tensor_model_parallel_size {tensor} * pipeline_model_parallel_size "
            f"{pipeline}): start a multiple of {tensor * pipeline} processes, as in "
            f"torchrun --nproc-per-node {tensor * pipeline}, or choose other sizes"
        )


def _check_whole(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"{name}={size!r} must be a whole number of at least 1.")


def check_logical_cores(size: int) -> None:
    """Raise ``ValueError`` for an ``lnc_size`` that is not 1."""
    if size != 1:
        raise ValueError(
            f"lnc_size={size!r}: logical cores are of Neuron devices. On a GPU or a CPU a rank has one device: give 1."
        )


def checked_shard_size(size: int | None, replicas: int) -> int:
    """Return ``data_parallel_shard_size``, by default the number of ``replicas``.

    Raises ``ValueError`` for a size that does not divide them, ``TypeError`` for no whole number.
    """
    if size is None:
        return replicas
    _check_whole("data_parallel_shard_size", size)
    if size < 1 or replicas % size:
        raise ValueError(
            f"data_parallel_shard_size={size} must divide the {counted(replicas, 'data-parallel rank')}: give a "
            "divisor, or leave it out to divide over all of them."
        )
    return int(size)


def checked_context_size(size: int, replicas: int) -> int:
    """Return ``context_parallel_size``.

    Raises ``ValueError`` for a size that does not divide the ``replicas``, ``TypeError`` for no whole number.
    """
    _check_whole("context_parallel_size", size)
    if size < 1 or replicas % size:
        raise ValueError(
            f"context_parallel_size={size} must divide the {counted(replicas, 'rank')} that the world / (tensor size * "
            f"pipeline size) has: so many consecutive ones share each sequence, and the rest are data-parallel. Give a "
            f"divisor, or start more processes."
        )
    return int(size)


def checked_expert_size(size: int, replicas: int) -> int:
    """Return ``expert_model_parallel_size``.

    Raises ``ValueError`` for a size that does not divide the ``replicas``, ``TypeError`` for no whole number.
    """
    _check_whole("expert_model_parallel_size", size)
    if size < 1 or replicas % size:
        raise ValueError(
            f"expert_model_parallel_size={size} must divide the {counted(replicas, 'data-parallel rank')}, which are "
            f"the world / (tensor size * pipeline size): consecutive ones share the experts of each layer. Give a "
            f"divisor, or start more processes."
        )
    return int(size)


def check_same(
    state: ProcessGroups,
    wanted: RankMesh,
    backend: str | None,
    device: str | None,
    timeouts: Timeouts,
    shard_size: int,
    expert_size: int,
    context_size: int,
) -> None:
    """Raise ``RuntimeError`` unless ``state`` has the groups, the devices and the limits that are asked for."""
    there = _named(state.rank_mesh, state.shard_size, state.expert_size, state.context_size, state.timeouts)
    asked = _named(wanted, shard_size, expert_size, context_size, timeouts)
    kind = state.device.type
    if wanted_device(backend, device) not in (None, kind):
        on = state.transfer_groups.backend if device is None and kind != "xla" else f"device={kind!r}"
        there, asked = [f"on {on}", *there], [written(backend, device), *asked]
    for one, other in zip(there, asked, strict=True):
        if one != other:
            wish = other.removeprefix("with ")
            raise RuntimeError(
                f"model parallelism is already initialized {one}, which differs from {wish}: call "
                f"destroy_model_parallel() first"
            )


def checked_folder(given: object, device: str | None) -> Path | None:
    """Return ``compilation_cache`` as an absolute path; ``None`` for none. XLA keeps compiled graphs in the folder.

    Raises ``TypeError`` for anything but a path, ``ValueError`` for a device other than XLA's and for a path where no
    folder can be.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"compilation_cache={given!r:.80} must be the path of a folder, or None for no cache.")
    if device != "xla":
        raise ValueError(
            f"compilation_cache={str(given)!r} is for device='xla', and device={device!r} compiles no graphs: leave "
            f"it out."
        )
    if not str(given):
        raise ValueError("compilation_cache='' names no folder: give its path, or None for no cache.")
    folder = Path(given).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"compilation_cache={str(given)!r} must be a folder, and {nearest} is a file.")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"compilation_cache={str(given)!r} cannot be written: no permission in {nearest}.")
    return folder


def _named(mesh: RankMesh, shard_size: int, expert_size: int, context_size: int, timeouts: Timeouts) -> list[str]:
    """Return what a start is made with, as its messages say it."""
    return [
        f"with tensor size {mesh.tensor} and pipeline size {mesh.pipeline}",
        f"with order={mesh.order!r}",
        f"with data_parallel_shard_size={shard_size}",
        f"with expert_model_parallel_size={expert_size}",
        f"with context_parallel_size={context_size}",
        *(f"with {name}={float(seconds):g}" for name, seconds in timeouts.named().items()),
    ]
