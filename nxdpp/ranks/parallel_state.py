"""Process groups of tensor, data and pipeline parallelism: initialization, and all getters.

The world is a mesh over the dimensions pipeline, data and tensor (``rank_mesh``). By default its ranks are in row-major
order of these. Tensor-parallel ranks communicate the most, so they are neighbours. 8 ranks with tensor size 2 and
pipeline size 2::

    pipeline 0:  data 0: 0 1    data 1: 2 3
    pipeline 1:  data 0: 4 5    data 1: 6 7

Rank 1 is in tensor group [0, 1], data group [1, 3] and pipeline group [1, 5]. With ``order=("data", "pipeline",
"tensor")`` each pipeline has consecutive ranks, as in nnScaler and in Megatron's ``use_tp_pp_dp_mapping``.

In the debug mode (``initialize_debug``) one process acts as a single rank of a job, without process groups.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nxdpp.devices.kinds import device_of, kind_of
from nxdpp.ranks import current_state, group_getters, launch, rank_getters
from nxdpp.ranks.current_state import DebugState
from nxdpp.ranks.faults import failure_watch, mistakes
from nxdpp.ranks.faults.board import StreamWaits, board
from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.group_getters import *  # noqa: F403  # all getters are names of this module
from nxdpp.ranks.known_keywords import knows_its_keywords
from nxdpp.ranks.process_groups import ProcessGroups, build_groups
from nxdpp.ranks.rank_getters import *  # noqa: F403  # all getters are names of this module
from nxdpp.ranks.rank_mesh import DIMENSIONS, RankMesh, checked_order
from nxdpp.ranks.start_checks import (
    check_logical_cores,
    check_same,
    check_sizes,
    checked_context_size,
    checked_expert_size,
    checked_folder,
    checked_shard_size,
)


@knows_its_keywords
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    order: Sequence[str] = DIMENSIONS,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    data_parallel_shard_size: int | None = None,
    lnc_size: int = 1,
    backend: str | None = None,
    device: str | None = None,
    hang_timeout: float = 300.0,
    compile_timeout: float = 3600.0,
    compilation_cache: str | os.PathLike[str] | None = None,
) -> None:
    """Divide the world into tensor, data and pipeline groups; collective over all ranks.

    Starts ``torch.distributed`` if it does not run. The world comes from the variables of torchrun, srun or mpirun;
    without them it is one process. The data-parallel size is ``world / (tensor * pipeline * context)``. From then on a
    rank that fails ends all ranks, see ``failure_watch``. A repeated call with the same arguments changes nothing.

    Stages on one host exchange CPU tensors through shared memory. ``NXDPP_P2P=gloo`` in the environment turns that off.

    Args:
        tensor_model_parallel_size: number of ranks that share each layer.
        pipeline_model_parallel_size: number of ranks in a pipeline.
        order: the dimensions ``"pipeline"``, ``"data"`` and ``"tensor"``, the outermost first. Ranks are in row-major
            order of it. The default is the order of NeuronX Distributed and Megatron; nnScaler has ``"data"`` first.
        context_parallel_size: consecutive ranks of those with the same stages that share each sequence
            (``nxdpp.context_parallelize``). All are given the same rows. The rest of these ranks are data-parallel.
        expert_model_parallel_size: consecutive data-parallel ranks that share the experts of a layer
            (``nxdpp.expert_parallelize``). It divides the data-parallel size; the rest are copies of the same experts.
        data_parallel_shard_size: consecutive ranks of a data group over which ``fully_shard`` divides parameters. The
            groups of such ranks are replicas of each other. ``None`` is all data-parallel ranks.
        lnc_size: physical cores in a logical one of a Neuron device; only 1.
        backend: ``"nccl"`` for CUDA devices, ``"gloo"`` for the CPU, and the backends of other accelerators. ``None``
            is that of the device.
        device: ``"cpu"``; ``"cuda"``, ``"xpu"`` or another type of accelerator that torch knows, also one of another
            package: the device of the local rank; or ``"xla"``, torch_xla's device of this process over gloo, see
            docs/xla.md. A type that has no backend trains over gloo, through host memory. ``None`` is the device of
            ``backend``; without both, the accelerator where one with a backend of its own is present, else the CPU.
        hang_timeout: seconds, at least 1. After that time in which no rank has moved, the position and the Python code
            of each rank are printed, and the job ends. 0 is for no limit. Code outside of nxdpp has no limit, see
            docs/faults.md. A single process has no limit either.
        compile_timeout: seconds, at least 1, that a rank may compile (``torch.compile``, XLA) while others wait for it.
            Then it counts as a rank that has not moved, so the longer of both limits holds. 0 is for no limit, as is
            ``hang_timeout=0``.
        compilation_cache: folder in which an XLA device keeps its compiled graphs from one start to the next; made if
            absent. It must be given before the first computation on the device. PJRT's CPU device cannot load graphs
            and refuses it; a device that fails to load one warns. See docs/xla.md.

    Raises:
        ValueError: for a size below 1, a world size that is no multiple of ``tensor * pipeline``, a size other than 1
            where only 1 is possible, an ``order`` without each dimension once, a timeout between 0 and 1 or below 0.
            For a backend or device that does not fit: an unknown one, NCCL without CUDA, two that exclude each
            other, or one that differs from a running world's, which must not have the backend ``"xla"``. Also for
            sizes or an order that differ from another rank's, and another value of ``NXDPP_P2P`` than ``gloo`` and
            ``shm``; all ranks then end. For a ``compilation_cache`` with another device than XLA's, and for one that is
            no folder.
        TypeError: for a timeout that is no number, and a ``compilation_cache`` that is no path.
        RuntimeError: after a call with other arguments, in the debug mode, if the launcher's variables
            are incomplete, if CUDA is present and this rank cannot use a device of its own, or if torch_xla is absent
            or cannot be used, or cannot use the ``compilation_cache``. Nothing is changed then. Also for ranks with
            devices of different kinds; all ranks end.
    """
    state = current_state.running()
    if isinstance(state, DebugState):
        raise state.refusal("initialize_model_parallel")
    if state is None:
        # A world of the backend "xla" has a different size than the launcher tells.
        launch.check_device(backend, device)
    tensor, pipeline = tensor_model_parallel_size, pipeline_model_parallel_size
    world_size = dist.get_world_size() if dist.is_initialized() else launch.world_size()
    check_sizes(tensor, pipeline, world_size)
    check_logical_cores(lnc_size)
    rank_mesh = RankMesh(pipeline, world_size // (tensor * pipeline), tensor, checked_order(order))
    shard_size = checked_shard_size(data_parallel_shard_size, rank_mesh.data)
    expert_size = checked_expert_size(expert_model_parallel_size, rank_mesh.data)
    context_size = checked_context_size(context_parallel_size, rank_mesh.data)
    timeouts = Timeouts(hang_timeout, compile_timeout)
    timeouts.check()
    cache = checked_folder(compilation_cache, device)
    if state is not None:
        check_same(state, rank_mesh, backend, device, timeouts, shard_size, expert_size, context_size)
        if cache is not None:
            device_of(group_getters.local_device()).keep_graphs(cache)
        return
    failure_watch.refuse_after_failure()
    mistakes.install()
    started_world = not dist.is_initialized()
    own_device = launch.choose_device(backend, device)
    if cache is not None:
        device_of(own_device).keep_graphs(cache)
    store = launch.start_world(own_device, timeouts) if started_world else launch.join_world(own_device)
    if world_size > 1:
        failure_watch.start(store, timeouts)
    with failure_watch.reported():
        groups = build_groups(
            rank_mesh, started_world, own_device, store, timeouts, shard_size, expert_size, context_size
        )
        current_state.replace(groups)
    board.is_compiling = device_of(own_device).is_compiling
    on_device = kind_of(own_device.type).backend != "gloo"
    board.stream_waits = StreamWaits(device_of(own_device).stamp) if on_device else None
    board.members["pipeline"] = frozenset(current_state.own_ranks("pipeline"))


@knows_its_keywords
def initialize_debug(
    *,
    pipeline_model_parallel_rank: int = 0,
    pipeline_model_parallel_size: int = 1,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    tensor_model_parallel_rank: int = 0,
    tensor_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    order: Sequence[str] = DIMENSIONS,
) -> None:
    """Start the debug mode: this process acts as one rank of a job; not collective.

    It shows what a rank of a large job would hold. The getters of ranks and sizes, and the getters of groups with
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
        expert_model_parallel_size: consecutive data-parallel ranks that share the experts of a layer.
        order: the dimensions, the outermost first, as in ``initialize_model_parallel``.

    Raises:
        ValueError: for a size below 1, a rank that is not below its size, an expert size that does not divide the
            replicas, or an ``order`` without each dimension once.
        RuntimeError: after ``initialize_model_parallel``, or in the debug mode of another rank; changes nothing then.
    """
    state = DebugState(
        ranks={
            "pipeline": pipeline_model_parallel_rank,
            "data": data_parallel_rank,
            "tensor": tensor_model_parallel_rank,
        },
        rank_mesh=RankMesh(
            pipeline_model_parallel_size, data_parallel_size, tensor_model_parallel_size, checked_order(order)
        ),
        expert_size=checked_expert_size(expert_model_parallel_size, data_parallel_size),
    )
    present = current_state.running()
    if present is not None and present != state:
        before = f"in the debug mode ({present})" if isinstance(present, DebugState) else "initialized, with processes"
        raise RuntimeError(
            f"initialize_debug was called for {state}, but model parallelism is already {before}: call "
            f"destroy_model_parallel() first"
        )
    current_state.replace(state)


def model_parallel_is_initialized() -> bool:
    """Return whether ranks and sizes are known; not collective.

    They are known after ``initialize_model_parallel``, while its world exists, and in the debug mode.
    """
    return current_state.running() is not None


def is_debug() -> bool:
    """Return whether this process is in the debug mode (``initialize_debug``); not collective."""
    return isinstance(current_state.running(), DebugState)


def refuse_in_debug(what: str) -> None:
    """Raise ``RuntimeError`` in the debug mode for ``what``, which needs other processes."""
    state = current_state.running()
    if isinstance(state, DebugState):
        raise state.refusal(what)


def destroy_model_parallel() -> None:
    """Undo ``initialize_model_parallel``, and its start of ``torch.distributed``.

    All ranks must call it, with no communication in flight. It also ends the debug mode, and otherwise does nothing.
    Afterwards other sizes and another order are possible.
    """
    state = current_state.running()
    current_state.replace(None)
    failure_watch.stop()
    if isinstance(state, ProcessGroups):
        state.destroy()


def move_model_to_device(model: torch.nn.Module, device: torch.device | str | int) -> None:
    """Move ``model`` to ``device``, as ``parallel_layers.move_model_to_device``, which the API guide lists here."""
    from nxdpp.tensor import move_model_to_device as tensor

    tensor.move_model_to_device(model, device)


# For other packages of nxdpp; not public.
_OWN = (
    *("get_context_control_group", "get_exchange", "get_expert_shard_mesh", "get_replica_control_group"),
    *("get_replica_group", "get_replica_rank", "get_replica_size", "get_shard_mesh", "has_shards", "is_debug"),
    "refuse_in_debug",
)
_MODULES = (__name__, group_getters.__name__, rank_getters.__name__)

# Type checkers read the star imports.
if not TYPE_CHECKING:
    _functions = {name: each for name, each in globals().items() if getattr(each, "__module__", "") in _MODULES}
    __all__ = sorted(name for name in _functions if not name.startswith("_") and name not in _OWN)


def __dir__() -> list[str]:
    return list(globals()["__all__"])
