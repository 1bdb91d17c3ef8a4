"""Process groups of tensor, data and pipeline parallelism: initialization and getters.

The world is a mesh of shape (pipeline, data, tensor) with ranks in row-major order. Tensor-parallel ranks communicate
the most, so they are neighbours. 8 ranks with tensor size 2 and pipeline size 2::

    pipeline 0:  data 0: 0 1    data 1: 2 3
    pipeline 1:  data 0: 4 5    data 1: 6 7

Rank 1 is in tensor group [0, 1], data group [1, 3] and pipeline group [1, 5].

In the debug mode (``initialize_debug``) one process acts as a single rank of a job, without process groups.
"""

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nxdpp.parallel_layers import failure_watch, launch
from nxdpp.parallel_layers.debug_state import DebugState
from nxdpp.parallel_layers.device_choice import check_backend
from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.faults.hang_timeout import check_hang_timeout
from nxdpp.parallel_layers.process_groups import ProcessGroups, build_groups, ranks_along
from nxdpp.parallel_layers.store_exchange import StoreExchange
from nxdpp.parallel_layers.transfer_groups import TransferGroups

_state: ProcessGroups | DebugState | None = None
_hang_timeout = 0.0


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    backend: str | None = None,
    hang_timeout: float = 300.0,
) -> None:
    """Divide the world into tensor, data and pipeline groups; collective over all ranks.

    Starts ``torch.distributed`` if it does not run. The world comes from the variables of torchrun, srun or mpirun;
    without them it is one process. The data-parallel size is ``world / (tensor * pipeline)``. From then on a rank that
    fails ends all ranks, see ``failure_watch``. A repeated call with the same arguments changes nothing.

    Args:
        tensor_model_parallel_size: number of ranks that share each layer.
        pipeline_model_parallel_size: number of ranks in a pipeline.
        backend: ``"nccl"`` for CUDA devices, ``"gloo"`` for the CPU. ``None`` is NCCL where CUDA is present, else gloo.
        hang_timeout: seconds, at least 1. After that time in which no rank has moved, the position and the Python code
            of each rank are printed, and the job ends. 0 is for no limit. Code outside of nxdpp has no limit, see
            docs/faults.md. A process alone has no limit either.

    Raises:
        ValueError: for a size below 1, a world size that is no multiple of ``tensor * pipeline``, a ``hang_timeout``
            between 0 and 1 or below 0, and a backend that does not fit: NCCL without CUDA, or another one than that of
            a running world.
        TypeError: for a ``hang_timeout`` that is no number.
        RuntimeError: after a call with other arguments, in the debug mode, if the launcher's variables
            are incomplete, or if CUDA is present and this rank cannot use a device of its own. Nothing is changed then.
    """
    global _state, _hang_timeout
    if isinstance(_state, DebugState):
        raise _state.refusal("initialize_model_parallel")
    tensor, pipeline = tensor_model_parallel_size, pipeline_model_parallel_size
    world_size = dist.get_world_size() if dist.is_initialized() else launch.world_size()
    _check_sizes(tensor, pipeline, world_size)
    check_hang_timeout(hang_timeout)
    if model_parallel_is_initialized():
        _check_same_sizes(tensor, pipeline)
        _check_same_backend(backend)
        _check_same_hang_timeout(hang_timeout)
        return
    failure_watch.refuse_after_failure()
    started_world = not dist.is_initialized()
    device = launch.choose_device(backend)
    store = launch.start_world(device) if started_world else launch.join_world()
    if world_size > 1:
        failure_watch.start(store, hang_timeout)
    _state = build_groups(tensor, pipeline, world_size, started_world, device, store)
    _hang_timeout = hang_timeout
    board.members["pipeline"] = frozenset(_own_pipeline(_state))


def initialize_debug(
    *,
    pipeline_model_parallel_rank: int = 0,
    pipeline_model_parallel_size: int = 1,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    tensor_model_parallel_rank: int = 0,
    tensor_model_parallel_size: int = 1,
) -> None:
    """Start the debug mode: this process acts as one rank of a job; not collective.

    It shows what a rank of a large job would hold. The getters of ranks and sizes, and those of groups with
    ``as_list=True``, answer as on that rank. ``local_device`` is the CPU. A model can be wrapped, materialised, loaded
    and moved, and its ``local_*`` methods work. Copies of a tied weight on other ranks are not compared.

    Functions that need other processes raise ``RuntimeError``: ``run_train``, ``run_eval``, all collective functions,
    ``partition="profiled"`` and the getters of groups. ``destroy_model_parallel`` ends the mode. A repeated call with
    the same numbers changes nothing.

    Args:
        pipeline_model_parallel_rank: rank in the pipeline; rank 0 has the first layers.
        pipeline_model_parallel_size: number of ranks in a pipeline.
        data_parallel_rank: index of the replica.
        data_parallel_size: number of replicas.
        tensor_model_parallel_rank: index among the ranks that share each layer.
        tensor_model_parallel_size: number of ranks that share each layer.

    Raises:
        ValueError: for a size below 1, or a rank that is not below its size.
        RuntimeError: after ``initialize_model_parallel``, or in the debug mode of another rank; changes nothing then.
    """
    global _state
    state = DebugState(
        ranks={
            "pipeline": pipeline_model_parallel_rank,
            "data": data_parallel_rank,
            "tensor": tensor_model_parallel_rank,
        },
        sizes={
            "pipeline": pipeline_model_parallel_size,
            "data": data_parallel_size,
            "tensor": tensor_model_parallel_size,
        },
    )
    if model_parallel_is_initialized() and _state != state:
        before = f"in the debug mode ({_state})" if isinstance(_state, DebugState) else "initialized, with processes"
        raise RuntimeError(
            f"initialize_debug was called for {state}, but model parallelism is already {before}: call "
            f"destroy_model_parallel() first"
        )
    _state = state


def model_parallel_is_initialized() -> bool:
    """Return whether ranks and sizes are known; not collective.

    They are known after ``initialize_model_parallel``, while its world exists, and in the debug mode.
    """
    if isinstance(_state, DebugState):
        return True
    return _state is not None and dist.is_initialized() and dist.group.WORLD is _state.world


def is_debug() -> bool:
    """Return whether this process is in the debug mode (``initialize_debug``); not collective."""
    return isinstance(_state, DebugState)


def refuse_in_debug(what: str) -> None:
    """Raise ``RuntimeError`` in the debug mode for ``what``, which needs other processes."""
    if isinstance(_state, DebugState):
        raise _state.refusal(what)


def destroy_model_parallel() -> None:
    """Undo ``initialize_model_parallel`` and stop ``torch.distributed`` if that function started it.

    All ranks must call it, with no communication in flight. It also ends the debug mode, and otherwise does nothing.
    """
    global _state
    groups = _state if model_parallel_is_initialized() else None
    _state = None
    failure_watch.stop()
    if isinstance(groups, ProcessGroups):
        groups.destroy()


def get_device_mesh() -> DeviceMesh:
    """Device mesh of shape (pipeline, data, tensor), with these dimension names."""
    return _with_groups().mesh


def get_tensor_model_parallel_size() -> int:
    """Number of ranks that share each layer."""
    return _initialized().size("tensor")


def get_data_parallel_size() -> int:
    """Number of replicas of the model, which train on different data."""
    return _initialized().size("data")


def get_pipeline_model_parallel_size() -> int:
    """Number of ranks in a pipeline."""
    return _initialized().size("pipeline")


def get_tensor_model_parallel_rank() -> int:
    """This rank's index in its tensor group."""
    return _initialized().rank("tensor")


def get_data_parallel_rank() -> int:
    """This rank's index in its data group."""
    return _initialized().rank("data")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's index in its pipeline group; rank 0 has the first layers."""
    return _initialized().rank("pipeline")


@overload
def get_tensor_model_parallel_group(as_list: Literal[False] = False) -> ProcessGroup: ...
@overload
def get_tensor_model_parallel_group(as_list: Literal[True]) -> list[list[int]]: ...
def get_tensor_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's tensor group; with ``as_list``, the global ranks of every tensor group."""
    return _ranks_of_groups("tensor") if as_list else _with_groups().mesh.get_group("tensor")


@overload
def get_data_parallel_group(as_list: Literal[False] = False) -> ProcessGroup: ...
@overload
def get_data_parallel_group(as_list: Literal[True]) -> list[list[int]]: ...
def get_data_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's data group; with ``as_list``, the global ranks of every data group."""
    return _ranks_of_groups("data") if as_list else _with_groups().mesh.get_group("data")


@overload
def get_pipeline_model_parallel_group(as_list: Literal[False] = False) -> ProcessGroup: ...
@overload
def get_pipeline_model_parallel_group(as_list: Literal[True]) -> list[list[int]]: ...
def get_pipeline_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's pipeline group, in stage order; with ``as_list``, the global ranks of every pipeline group."""
    return _ranks_of_groups("pipeline") if as_list else _with_groups().mesh.get_group("pipeline")


def get_model_parallel_group() -> ProcessGroup:
    """Group of the pipeline and tensor ranks of this rank's replica; its first use is collective over it."""
    return _with_groups().model_group


def get_pipeline_control_group() -> ProcessGroup:
    """Gloo group over this rank's pipeline group, for tensors and objects in CPU memory.

    On gloo it is the pipeline group itself.
    """
    return _with_groups().control_group


def get_data_parallel_control_group() -> ProcessGroup:
    """Group over this rank's data group for tensors in CPU memory, where there are several replicas: a gloo group.

    On gloo it is the data group itself.
    """
    return _with_groups().replica_control_group


def get_pipeline_transfer_groups() -> TransferGroups:
    """Groups for the P2P transfers between the stages of this rank's pipeline.

    NCCL runs the transfers of a group in the order of the calls, so neighbours have groups of their own. Gloo has
    message tags: there all transfers use the pipeline group itself.
    """
    return _with_groups().transfer_groups


def get_exchange() -> StoreExchange:
    """Exchange of small values between all ranks, over the world's store."""
    return _with_groups().exchange


def local_device() -> torch.device:
    """Device of this rank's parameters: its CUDA device on NCCL, else (and in the debug mode) the CPU."""
    state = _initialized()
    return torch.device("cpu") if isinstance(state, DebugState) else state.device


def _with_groups() -> ProcessGroups:
    state = _initialized()
    if isinstance(state, DebugState):
        raise state.refusal("a process group")
    return state


def _initialized() -> ProcessGroups | DebugState:
    if _state is None or not model_parallel_is_initialized():
        raise RuntimeError(
            "there are no process groups yet: call nxdpp.parallel_state.initialize_model_parallel("
            "tensor_model_parallel_size, pipeline_model_parallel_size) first, on all ranks"
        )
    return _state


def _check_sizes(tensor: int, pipeline: int, world_size: int) -> None:
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


def _check_same_sizes(tensor: int, pipeline: int) -> None:
    state = _initialized()
    before = (state.size("tensor"), state.size("pipeline"))
    if before != (tensor, pipeline):
        raise RuntimeError(
            f"model parallelism is already initialized with tensor size {before[0]} and pipeline size "
            f"{before[1]}, which differs from {tensor} and {pipeline}: call destroy_model_parallel() first"
        )


def _check_same_backend(backend: str | None) -> None:
    check_backend(backend)
    before = _with_groups().transfer_groups.backend
    if backend not in (None, before):
        raise RuntimeError(
            f"model parallelism is already initialized on {before}, which differs from backend={backend!r}: call "
            f"destroy_model_parallel() first"
        )


def _check_same_hang_timeout(seconds: float) -> None:
    if seconds != _hang_timeout:
        raise RuntimeError(
            f"model parallelism is already initialized with hang_timeout={_hang_timeout:g}, which differs from "
            f"{seconds:g}: call destroy_model_parallel() first"
        )


def _own_pipeline(groups: ProcessGroups) -> list[int]:
    rank = dist.get_rank()
    return next(ranks for ranks in ranks_along(groups.mesh_of_ranks, "pipeline") if rank in ranks)


def _ranks_of_groups(dimension: str) -> list[list[int]]:
    return ranks_along(_initialized().mesh_of_ranks, dimension)
