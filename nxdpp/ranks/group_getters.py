"""Getters of groups, under the names of NeuronX Distributed. Only the first use of a group is collective over it.

With ``as_list=True``, and as replica groups, a getter returns the global ranks of every group of that kind in the job.
It does so in the debug mode too. All raise ``RuntimeError`` before ``initialize_model_parallel``.
"""

from collections.abc import Callable
from typing import Literal, Protocol, cast, overload

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nxdpp.ranks import current_state
from nxdpp.ranks.current_state import DebugState
from nxdpp.ranks.store_exchange import StoreExchange
from nxdpp.ranks.transfer_groups import TransferGroups


class _GroupGetter(Protocol):
    """Type of a getter of this rank's group, or ``as_list`` of the ranks of all groups of the kind."""

    @overload
    def __call__(self, as_list: Literal[False] = False) -> ProcessGroup: ...
    @overload
    def __call__(self, as_list: Literal[True]) -> list[list[int]]: ...


def _overloaded(getter: Callable[[bool], ProcessGroup | list[list[int]]]) -> _GroupGetter:
    return cast(_GroupGetter, getter)


@_overloaded
def get_tensor_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's tensor group; with ``as_list``, the global ranks of every tensor group."""
    return _groups("tensor") if as_list else current_state.with_groups().mesh.get_group("tensor")


@_overloaded
def get_data_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """Group of the ranks that train other rows; with ``as_list``, the global ranks of every such group.

    It has this rank's part of each sequence (``context_parallel_size``).
    """
    if as_list:
        return get_data_parallel_replica_groups()
    state = current_state.with_groups()
    return state.context_groups[1] if state.context_groups else state.mesh.get_group("data")


@_overloaded
def get_replica_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """Group of the ranks with this rank's parameters: data times context; with ``as_list``, the ranks of all."""
    return _groups("data") if as_list else current_state.with_groups().mesh.get_group("data")


@_overloaded
def get_pipeline_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's pipeline group, in stage order; with ``as_list``, the global ranks of every pipeline group."""
    return _groups("pipeline") if as_list else current_state.with_groups().mesh.get_group("pipeline")


@_overloaded
def get_context_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """Group of the ranks that share each sequence; with ``as_list``, the global ranks of every such group."""
    if as_list:
        return get_context_model_parallel_replica_groups()
    state = current_state.with_groups()
    return state.context_groups[0] if state.context_groups else state.own_group


@_overloaded
def get_expert_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """This rank's expert group; with ``as_list``, the global ranks of every expert group."""
    if as_list:
        return get_expert_model_parallel_replica_groups()
    state = current_state.with_groups()
    return state.expert_groups[0] if state.expert_groups else state.own_group


@_overloaded
def get_expert_data_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """Group of the ranks with the same experts; with ``as_list``, the global ranks of every such group."""
    if as_list:
        return get_expert_data_parallel_replica_groups()
    state = current_state.with_groups()
    return state.expert_groups[1] if state.expert_groups else state.mesh.get_group("data")


@_overloaded
def get_model_parallel_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """Group of the pipeline and tensor ranks of this rank's replica; its first use is collective over it."""
    return current_state.initialized().rank_mesh.models() if as_list else current_state.with_groups().model_group


@_overloaded
def get_world_group(as_list: bool = False) -> ProcessGroup | list[list[int]]:
    """Group of all ranks."""
    if as_list:
        return [list(range(current_state.initialized().rank_mesh.ranks.numel()))]
    return current_state.with_groups().world


def get_tensor_model_parallel_replica_groups() -> list[list[int]]:
    """Global ranks of every tensor group."""
    return _groups("tensor")


def get_data_parallel_replica_groups() -> list[list[int]]:
    """Global ranks of every data group."""
    state = current_state.initialized()
    return state.rank_mesh.strided_groups(state.context_size)


def get_pipeline_model_parallel_replica_groups() -> list[list[int]]:
    """Global ranks of every pipeline group, each in stage order."""
    return _groups("pipeline")


def get_context_model_parallel_replica_groups() -> list[list[int]]:
    """Global ranks of every group of ranks that share each sequence."""
    state = current_state.initialized()
    return state.rank_mesh.consecutive_groups(state.context_size)


def get_expert_model_parallel_replica_groups() -> list[list[int]]:
    """Global ranks of every expert group."""
    state = current_state.initialized()
    return state.rank_mesh.consecutive_groups(state.expert_size)


def get_expert_data_parallel_replica_groups() -> list[list[int]]:
    """Global ranks of every group of ranks with the same experts."""
    state = current_state.initialized()
    return state.rank_mesh.strided_groups(state.expert_size)


def get_device_mesh() -> DeviceMesh:
    """Device mesh with the dimensions (pipeline, data, tensor), under any order of the ranks."""
    return current_state.with_groups().mesh


def get_shard_mesh() -> DeviceMesh:
    """Device mesh of the ranks that share this rank's shards.

    Of shape (data,), or (replicas of shards, shard) with ``data_parallel_shard_size``. Its first use is collective over
    the data group.
    """
    return current_state.with_groups().shard_mesh


def get_expert_shard_mesh() -> DeviceMesh:
    """Device mesh of the ranks that share the shards of this rank's experts: the ones with the same experts."""
    return current_state.with_groups().expert_shard_mesh


def has_shards() -> bool:
    """Return whether a model of this job has been sharded over ``get_shard_mesh``; equal on all ranks."""
    return current_state.with_groups().has_shards


def get_pipeline_control_group() -> ProcessGroup:
    """Gloo group over this rank's pipeline group, for tensors and objects in CPU memory.

    On gloo it is the pipeline group itself.
    """
    return current_state.with_groups().control_groups["pipeline"]


def get_replica_control_group() -> ProcessGroup:
    """Gloo group over ``get_replica_group()``, for tensors in CPU memory; exists where there are several replicas.

    On gloo it is that group itself.
    """
    return current_state.with_groups().control_groups["data"]


def get_context_control_group() -> ProcessGroup:
    """Gloo group over the ranks that share each sequence, for tensors in CPU memory; exists where there are several."""
    return current_state.with_groups().context_groups[2]


def get_tensor_control_group() -> ProcessGroup:
    """Gloo group over this rank's tensor group, for tensors in CPU memory; exists where it has several ranks.

    On gloo it is the tensor group itself.
    """
    return current_state.with_groups().control_groups["tensor"]


def get_pipeline_transfer_groups() -> TransferGroups:
    """Groups for the P2P transfers between the stages of this rank's pipeline.

    NCCL runs the transfers of a group in the order of the calls, so neighbours have groups of their own. Gloo has
    message tags: there all transfers use the pipeline group itself.
    """
    return current_state.with_groups().transfer_groups


def get_exchange() -> StoreExchange:
    """Exchange of small values between all ranks, over the world's store."""
    return current_state.with_groups().exchange


def local_device() -> torch.device:
    """Device of this rank's parameters: its CUDA device on NCCL, else (and in the debug mode) the CPU."""
    state = current_state.initialized()
    return torch.device("cpu") if isinstance(state, DebugState) else state.device


get_tensor_parallel_replica_groups = get_tensor_model_parallel_replica_groups


def _groups(dimension: str) -> list[list[int]]:
    return current_state.initialized().rank_mesh.groups(dimension)
