"""Checks of the arguments of ``initialize_model_parallel``, before anything is started."""

from numbers import Integral

from nxdpp.ranks.device_arguments import wanted_device, written
from nxdpp.ranks.process_groups import ProcessGroups
from nxdpp.ranks.rank_mesh import RankMesh


def check_sizes(tensor: int, pipeline: int, world_size: int) -> None:
    """Raise ``ValueError`` for a size below 1, and for sizes that do not divide the world.

    Raises ``TypeError`` for a size that is no whole number.
    """
    for name, size in (("tensor_model_parallel_size", tensor), ("pipeline_model_parallel_size", pipeline)):
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{name}={size!r} must be a whole number of at least 1.")
    if tensor < 1 or pipeline < 1:
        raise ValueError(
            "tensor_model_parallel_size and pipeline_model_parallel_size must be at least 1, "
            f"not {tensor} and {pipeline}"
        )
    if world_size % (tensor * pipeline):
        raise ValueError(
            f"a world of {world_size} ranks does not divide into model replicas of "
            f"{tensor * pipeline} (tensor_model_parallel_size {tensor} * pipeline_model_parallel_size "
            f"{pipeline}): start a multiple of {tensor * pipeline} processes, as in "
            f"torchrun --nproc-per-node {tensor * pipeline}, or choose other sizes"
        )


def check_ones(context: int, expert: int, lnc: int) -> None:
    """Raise ``ValueError`` for a size other than 1 of a dimension that nxdpp does not have."""
    if context != 1:
        raise ValueError(
            f"context_parallel_size={context!r}: nxdpp does not split sequences over ranks. Give 1, and use the ranks "
            f"for pipeline, tensor or data parallelism."
        )
    if expert != 1:
        raise ValueError(
            f"expert_model_parallel_size={expert!r}: nxdpp does not split the experts of a layer over ranks. Give 1; "
            f"a pipeline has the experts of each layer on one stage."
        )
    if lnc != 1:
        raise ValueError(
            f"lnc_size={lnc!r}: logical cores are of Neuron devices. On a GPU or a CPU each rank has one device: "
            f"give 1."
        )


def check_same_mesh(state: ProcessGroups, wanted: RankMesh) -> None:
    """Raise ``RuntimeError`` unless ``state`` has the groups of ``wanted``."""
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


def check_same_device(state: ProcessGroups, backend: str | None, device: str | None) -> None:
    """Raise ``RuntimeError`` unless ``state`` has the devices that the arguments ask for."""
    before = state.device.type
    if wanted_device(backend, device) not in (None, before):
        on = state.transfer_groups.backend if device is None and before != "xla" else f"device={before!r}"
        raise RuntimeError(
            f"model parallelism is already initialized on {on}, which differs from {written(backend, device)}: call "
            f"destroy_model_parallel() first"
        )
