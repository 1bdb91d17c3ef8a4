"""Which ranks work together: the process groups of tensor, data and pipeline parallelism.

The world is a mesh of shape (pipeline, data, tensor) with ranks in row-major order, so that tensor
ranks, which talk the most, are neighbours. 8 ranks with tensor size 2 and pipeline size 2::

    pipeline 0:  data 0: 0 1    data 1: 2 3
    pipeline 1:  data 0: 4 5    data 1: 6 7

Rank 1 is in tensor group [0, 1], data group [1, 3] and pipeline group [1, 5].

In the debug mode (``initialize_debug``) one process says which rank of which sizes it is, and there are no groups.
"""

from dataclasses import dataclass
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nxdpp.parallel_layers import failure_watch, launch
from nxdpp.parallel_layers.debug_state import DebugState

_DIMENSIONS = ("pipeline", "data", "tensor")


@dataclass(frozen=True)
class _State:
    mesh: DeviceMesh
    control_group: ProcessGroup
    transfer_groups: tuple[ProcessGroup, ...]
    world: ProcessGroup
    started_world: bool

    def size(self, dimension: str) -> int:
        return self.mesh.size(_DIMENSIONS.index(dimension))

    def rank(self, dimension: str) -> int:
        return self.mesh.get_local_rank(dimension)

    @property
    def mesh_of_ranks(self) -> torch.Tensor:
        return self.mesh.mesh


# Activations and gradients, each to lower and to higher ranks.
_WAYS = 4

_state: _State | DebugState | None = None


def initialize_model_parallel(tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1) -> None:
    """Divides the world into tensor, data and pipeline groups; collective over all ranks.

    Starts ``torch.distributed`` if nobody has: NCCL where each local rank has a CUDA device, else gloo,
    from torchrun's variables, or as a world of one where there are none. The data-parallel size is what
    is left, ``world / (tensor * pipeline)``. From here on a rank that fails ends all ranks, see
    ``failure_watch``. A repeated call with the same sizes changes nothing.

    Raises ``ValueError`` for a size below 1 or a world that does not divide, ``RuntimeError`` if it was
    called before with other sizes, in the debug mode, or where torchrun's variables are incomplete, before
    anything is changed.
    """
    if isinstance(_state, DebugState):
        raise _state.refusal("initialize_model_parallel")
    tensor, pipeline = tensor_model_parallel_size, pipeline_model_parallel_size
    world_size = dist.get_world_size() if dist.is_initialized() else launch.world_size()
    _check_sizes(tensor, pipeline, world_size)
    if model_parallel_is_initialized():
        _check_same_sizes(tensor, pipeline)
        return
    started_world = not dist.is_initialized()
    if started_world:
        launch.start_world()
    if world_size > 1:
        failure_watch.start()
    _build(tensor, pipeline, world_size, started_world)


def initialize_debug(
    *,
    pipeline_model_parallel_rank: int = 0,
    pipeline_model_parallel_size: int = 1,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    tensor_model_parallel_rank: int = 0,
    tensor_model_parallel_size: int = 1,
) -> None:
    """Begins the debug mode: this process alone takes the place of one rank of a job; not collective.

    To see what a rank of a large job would hold, without that job. The getters of ranks and sizes, and those of
    groups with ``as_list=True``, answer as on that rank; ``local_device`` is the CPU. A model, best one on the meta
    device, can be wrapped, materialised, loaded, moved (no other rank's copy of a tied weight is looked at) and seen
    through its ``local_*`` methods. ``torch.distributed`` is not
    started, and whatever needs other processes raises ``RuntimeError``: ``run_train`` and ``run_eval``, what is
    collective, ``partition="profiled"``, the getters of groups. ``destroy_model_parallel`` ends it. A repeated call
    with the same numbers changes nothing.

    Args:
        pipeline_model_parallel_rank: which rank of its pipeline; 0 has the first layers.
        pipeline_model_parallel_size: how many ranks the layers are spread over.
        data_parallel_rank: which of the replicas.
        data_parallel_size: how many copies of the model there are.
        tensor_model_parallel_rank: which of the ranks that share each layer.
        tensor_model_parallel_size: how many share each layer.

    Raises ``ValueError`` for a size below 1 or a rank that is not below its size, ``RuntimeError`` after
    ``initialize_model_parallel``, or in the debug mode of another rank, before anything is changed.
    """
    global _state
    state = DebugState(
        dict(
            zip(
                _DIMENSIONS, (pipeline_model_parallel_rank, data_parallel_rank, tensor_model_parallel_rank), strict=True
            )
        ),
        dict(
            zip(
                _DIMENSIONS, (pipeline_model_parallel_size, data_parallel_size, tensor_model_parallel_size), strict=True
            )
        ),
    )
    if model_parallel_is_initialized() and _state != state:
        before = f"in the debug mode ({_state})" if isinstance(_state, DebugState) else "initialized, with processes"
        raise RuntimeError(
            f"initialize_debug was called for {state}, but model parallelism is already {before}: call "
            f"destroy_model_parallel() first"
        )
    _state = state


def model_parallel_is_initialized() -> bool:
    """Whether ranks and sizes can be asked for; not collective.

    They can after ``initialize_model_parallel``, while its world stands, and after ``initialize_debug``.
    """
    if isinstance(_state, DebugState):
        return True
    return _state is not None and dist.is_initialized() and dist.group.WORLD is _state.world


def is_debug() -> bool:
    """Whether this process stands for a rank of a job that does not run (``initialize_debug``); not collective."""
    return isinstance(_state, DebugState)


def refuse_in_debug(what: str) -> None:
    """Raise ``RuntimeError`` in the debug mode, where ``what``, which needs other processes, cannot be done."""
    if isinstance(_state, DebugState):
        raise _state.refusal(what)


def destroy_model_parallel() -> None:
    """Undoes ``initialize_model_parallel``, with ``torch.distributed`` if that had started it.

    All ranks call it, when nothing is under way between them. Also ends the debug mode. Does nothing where there is
    nothing to undo.
    """
    global _state
    state, stands = _state, model_parallel_is_initialized()
    _state = None
    failure_watch.stop()
    if state is None or isinstance(state, DebugState) or not stands:
        return
    if state.started_world:
        dist.destroy_process_group()
        return
    groups = [*state.mesh.get_all_groups(), state.control_group, *state.transfer_groups]
    for group in dict.fromkeys(groups):
        if group is not state.world:
            dist.destroy_process_group(group)


def get_device_mesh() -> DeviceMesh:
    """The mesh, of shape (pipeline, data, tensor) with dimensions of those names."""
    return _with_groups().mesh


def get_tensor_model_parallel_size() -> int:
    """How many ranks share each layer."""
    return _initialized().size("tensor")


def get_data_parallel_size() -> int:
    """How many copies of the model train on different data."""
    return _initialized().size("data")


def get_pipeline_model_parallel_size() -> int:
    """How many ranks the layers are spread over."""
    return _initialized().size("pipeline")


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in its tensor group."""
    return _initialized().rank("tensor")


def get_data_parallel_rank() -> int:
    """This rank's place in its data group."""
    return _initialized().rank("data")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's place in its pipeline group; 0 has the first layers."""
    return _initialized().rank("pipeline")


@overload
def get_tensor_model_parallel_group(as_list: Literal[False] = False) -> ProcessGroup: ...
@overload
def get_tensor_model_parallel_group(as_list: Literal[True]) -> list[list[int]]: ...
def get_tensor_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's tensor group; ``as_list``: the global ranks of every tensor group."""
    return _group_ranks("tensor") if as_list else _with_groups().mesh.get_group("tensor")


@overload
def get_data_parallel_group(as_list: Literal[False] = False) -> ProcessGroup: ...
@overload
def get_data_parallel_group(as_list: Literal[True]) -> list[list[int]]: ...
def get_data_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's data group; ``as_list``: the global ranks of every data group."""
    return _group_ranks("data") if as_list else _with_groups().mesh.get_group("data")


@overload
def get_pipeline_model_parallel_group(as_list: Literal[False] = False) -> ProcessGroup: ...
@overload
def get_pipeline_model_parallel_group(as_list: Literal[True]) -> list[list[int]]: ...
def get_pipeline_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's pipeline group, in stage order; ``as_list``: the global ranks of every pipeline group."""
    return _group_ranks("pipeline") if as_list else _with_groups().mesh.get_group("pipeline")


def get_pipeline_control_group() -> ProcessGroup:
    """A gloo group over this rank's pipeline group, for what lies in CPU memory.

    Where the pipeline group is gloo's, it is that group itself.
    """
    return _with_groups().control_group


def get_pipeline_transfer_groups() -> tuple[ProcessGroup, ...]:
    """The four groups over this rank's pipeline group that values between stages travel on.

    Activations to lower ranks, to higher ranks, gradients to lower ranks, to higher ranks: NCCL does what is asked of
    a group in the order of the calls, so that one kind of message would hold up another. Where the pipeline group is
    gloo's, whose messages have tags, all are that group itself.
    """
    return _with_groups().transfer_groups


def local_device() -> torch.device:
    """Where this rank's parameters belong: ``cuda:LOCAL_RANK`` on NCCL, else the CPU, as in the debug mode."""
    return torch.device("cpu") if isinstance(_initialized(), DebugState) else launch.local_device()


def _with_groups() -> _State:
    state = _initialized()
    if isinstance(state, DebugState):
        raise state.refusal("a process group")
    return state


def _initialized() -> _State | DebugState:
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


def _build(tensor: int, pipeline: int, world_size: int, started_world: bool) -> None:
    """Creates the groups, all ranks the same ones in the same order."""
    global _state
    device = launch.local_device()
    ranks = torch.arange(world_size).view(pipeline, world_size // (tensor * pipeline), tensor)
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=_DIMENSIONS)
    control_group = mesh.get_group("pipeline")
    transfer_groups = (control_group,) * _WAYS
    if device.type == "cuda":
        pipelines = _lines(ranks, "pipeline")
        control_group = _own_group(pipelines, "gloo")
        transfer_groups = tuple(_own_group(pipelines, "nccl") for _ in range(_WAYS))
    world = dist.group.WORLD
    assert world is not None
    _state = _State(mesh, control_group, transfer_groups, world, started_world)


def _own_group(lists_of_ranks: list[list[int]], backend: str) -> ProcessGroup:
    """Creates a group for each list, on all ranks, and picks the one this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration(lists_of_ranks, backend=backend)
    assert isinstance(group, ProcessGroup)
    return group


def _group_ranks(dimension: str) -> list[list[int]]:
    return _lines(_initialized().mesh_of_ranks, dimension)


def _lines(ranks: torch.Tensor, dimension: str) -> list[list[int]]:
    """The global ranks along one dimension, for every place in the others."""
    index = _DIMENSIONS.index(dimension)
    lines: list[list[int]] = ranks.movedim(index, -1).reshape(-1, ranks.shape[index]).tolist()
    return lines
