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
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"{name}={size!r} must be a whole number of at least 1.")
    if tensor < 1 or pipeline < 1:
        raise ValueError(
            "tensor_model_parallel_size and pipeline_model_parallel_size must be at least 1, "
            f"not {tensor} and {pipeline}"
        )
    if world_size % (tensor * pipeline):
        raise ValueError(
            f"a world of {counted(world_size, 'rank')} does not divide into model replicas of "
            f"{tensor * pipeline} (tensor_model_parallel_size {tensor} * pipeline_model_parallel_size "
            f"{pipeline}): start a multiple of {tensor * pipeline} processes, as in "
            f"torchrun --nproc-per-node {tensor * pipeline}, or choose other sizes"
        )


def check_ones(context: int, lnc: int) -> None:
    """Raise ``ValueError`` for a size other than 1 of a dimension that nxdpp does not have."""
    if context != 1:
        raise ValueError(
            f"context_parallel_size={context!r}: nxdpp does not split sequences over ranks. Give 1, and use the ranks "
            f"for pipeline, tensor or data parallelism."
        )
    if lnc != 1:
        raise ValueError(
            f"lnc_size={lnc!r}: logical cores are of Neuron devices. On a GPU or a CPU each rank has one device: "
            f"give 1."
        )


def checked_shard_size(size: int | None, replicas: int) -> int:
    """Return ``data_parallel_shard_size``, by default the number of ``replicas``.

    Raises ``ValueError`` for a size that does not divide them, ``TypeError`` for no whole number.
    """
    if size is None:
        return replicas
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"data_parallel_shard_size={size!r} must be a whole number of at least 1, or None.")
    if size < 1 or replicas % size:
        raise ValueError(
            f"data_parallel_shard_size={size} must divide the {counted(replicas, 'data-parallel rank')}: give a "
            "divisor, or leave it out to divide over all of them."
        )
    return int(size)


def checked_expert_size(size: int, replicas: int) -> int:
    """Return ``expert_model_parallel_size``.

    Raises ``ValueError`` for a size that does not divide the ``replicas``, ``TypeError`` for no whole number.
    """
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"expert_model_parallel_size={size!r} must be a whole number of at least 1.")
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
) -> None:
    """Raise ``RuntimeError`` unless ``state`` has the groups, the devices and the limits that are asked for."""
    before = state.rank_mesh
    if (before.tensor, before.pipeline) != (wanted.tensor, wanted.pipeline):
        raise RuntimeError(
            f"model parallelism is already initialized with tensor size {before.tensor} and pipeline size "
            f"{before.pipeline}, which differs from {wanted.tensor} and {wanted.pipeline}: call "
            f"destroy_model_parallel() first"
        )
    if before.order != wanted.order:
        raise RuntimeError(
            f"model parallelism is already initialized with order={before.order!r}, which differs from "
            f"order={wanted.order!r}: call destroy_model_parallel() first"
        )
    if state.shard_size != shard_size:
        raise RuntimeError(
            f"model parallelism is already initialized with data_parallel_shard_size={state.shard_size}, which differs "
            f"from {shard_size}: call destroy_model_parallel() first"
        )
    if state.expert_size != expert_size:
        raise RuntimeError(
            f"model parallelism is already initialized with expert_model_parallel_size={state.expert_size}, which "
            f"differs from {expert_size}: call destroy_model_parallel() first"
        )
    kind = state.device.type
    if wanted_device(backend, device) not in (None, kind):
        on = state.transfer_groups.backend if device is None and kind != "xla" else f"device={kind!r}"
        raise RuntimeError(
            f"model parallelism is already initialized on {on}, which differs from {written(backend, device)}: call "
            f"destroy_model_parallel() first"
        )
    state.timeouts.refuse_change(timeouts)


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
