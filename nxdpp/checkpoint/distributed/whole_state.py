"""State dict with whole tensors on rank 0, of a model that ranks hold in parts.

Only ranks of the first data-parallel replica send, and of its expert group for experts, one tensor at a time::

    data-parallel ranks                              all-gather of the rows of ``fully_shard``
    tensor group of the first stage that holds it    all-gather of the parts; of experts the expert group
    its first rank                                   joins them in host memory, sends
    rank 0                                           receives
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.checkpoint.distributed.model_state import ModelTensors, local_module_of, model_tensors, names_of
from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole, placement_of
from nxdpp.checkpoint.huggingface.model_tensors import WrappedModel
from nxdpp.counted import counted
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.pipeline.local.half_loaded import check_whole
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.tensor.collectives import all_gather
from nxdpp.tensor.shards import all_rows

_PIECE_BYTES = 2**26
_TAG = 0


class _Held(NamedTuple):
    """A tensor with values on a rank: its dtype, its place in the whole, and whether it is of experts over ranks."""

    dtype: torch.dtype
    placement: PlaceInWhole
    of_experts: bool


class _Source(NamedTuple):
    """The ranks of a tensor or expert group that hold a tensor, and the parts in their order."""

    ranks: Sequence[int]
    parts: Sequence[_Held]


def gather_state_dict(model: nn.Module | WrappedModel) -> dict[str, torch.Tensor] | None:
    """Return the state dict of the whole ``model`` on rank 0, ``None`` on other ranks; collective over all ranks.

    Names and order are the model's from before it was wrapped. A tied tensor is there under each of its names, as one
    object. Tensors are copies in host memory, whole and without padding. Rank 0 needs memory for all of them,
    and each tensor group for one at a time. The first data-parallel replica gives the values. A tensor on the meta
    device counts as one that the rank does not have.

    Args:
        model: an ``NxDPPModel``, or a module in the memory of each rank. Its parameters may be
            divided over the tensor-parallel ranks (``tensor_parallelize``, ``ColumnParallelLinear``).

    Raises:
        ValueError: on all ranks, for a tensor that has values on no rank, and for state other than dense parameters
            and buffers.
        RuntimeError: before ``initialize_model_parallel``, and in the debug mode.
    """
    parallel_state.refuse_in_debug("gather_state_dict")
    failure_watch.refuse_after_failure()
    with board.call("gather_state_dict"):
        return gather_tensors(cast(nn.Module, model), "no state was gathered")


def gather_tensors(
    model: nn.Module | WrappedModel, consequence: str, names: Collection[str] | None = None
) -> dict[str, torch.Tensor] | None:
    """Return all tensors of ``model``, or ``names``, as ``gather_state_dict``; errors say ``consequence``."""
    model = cast(nn.Module, model)

    def tensors() -> ModelTensors:
        check_whole(local_module_of(model))
        found = model_tensors(model)
        quantized = [name for name in found.quantized if names is None or name in names]
        if quantized:
            raise ValueError(
                f"{quantized[0]} is a quantized weight, and only dense tensors are gathered: save_pretrained writes "
                f"adapters, and local_state_dict() has this rank's weights."
            )
        return found

    exchange = Exchange(consequence=consequence)
    local = exchange.together(tensors)
    wanted = [name for name in names_of(model) if names is None or name in names]
    # Rank 0's names and ties count: a module whose tensors are elsewhere may have lost its ties.
    firsts = exchange.from_first(lambda: {name: local.ties.get(name, name) for name in wanted})
    here = _with_values(local, firsts)
    replica, expert_size = parallel_state.get_replica_rank(), parallel_state.get_expert_model_parallel_size()
    held = {
        name: _Held(tensor.dtype, placement_of(tensor)._replace(begin=0), is_of_experts(tensor))
        for name, tensor in here.items()
        if replica < (expert_size if is_of_experts(tensor) else 1)
    }
    everyones = exchange.gather(held)
    sources = exchange.together(lambda: _sources(list(firsts.values()), everyones))
    with failure_watch.reported(), torch.no_grad():
        whole = {name: _on_rank_0(_all_rows(here.get(name), source), source) for name, source in sources.items()}
    if dist.get_rank() > 0:
        return None
    return {name: cast(torch.Tensor, whole[first]) for name, first in firsts.items()}


def _with_values(local: ModelTensors, firsts: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors that this rank has, under the first one of their names by ``firsts``."""
    found: dict[str, torch.Tensor] = {}
    for name, first in firsts.items():
        tensor = local.tensors.get(local.ties.get(name, name))
        if tensor is not None and not tensor.is_meta:
            found.setdefault(first, tensor)
    return found


def _sources(names: Sequence[str], everyones: Sequence[Mapping[str, _Held]]) -> dict[str, _Source]:
    """The source of each of ``names``: the first tensor or expert group whose ranks all hold it."""
    sources: dict[str, _Source] = {}
    of_tensors = parallel_state.get_tensor_model_parallel_group(as_list=True)
    of_experts = parallel_state.get_expert_model_parallel_group(as_list=True)
    for is_expert, ranks in [*((False, each) for each in of_tensors), *((True, each) for each in of_experts)]:
        held = [everyones[rank] for rank in ranks]
        for name in names:
            if name not in sources and all(name in each and each[name].of_experts is is_expert for each in held):
                sources[name] = _Source(ranks, [each[name] for each in held])
    missing = [name for name in dict.fromkeys(names) if name not in sources]
    if missing:
        raise ValueError(
            f"{counted(len(missing), 'tensor of the model has', 'tensors of the model have')} values on no tensor "
            f"group ({missing[0]} is the first): call load_pretrained(model, DIRECTORY) or model.materialise()."
        )
    return sources


def _all_rows(tensor: torch.Tensor | None, source: _Source) -> torch.Tensor | None:
    """``tensor`` with the rows of all ranks that have a shard of it, on the ranks that need them for ``source``."""
    of_experts = source.parts[0].of_experts
    groups = parallel_state.get_expert_data_parallel_group if of_experts else parallel_state.get_replica_group
    first = next(ranks[0] for ranks in groups(as_list=True) if dist.get_rank() in ranks)
    return all_rows(tensor) if tensor is not None and first in source.ranks else tensor


def _on_rank_0(tensor: torch.Tensor | None, source: _Source) -> torch.Tensor | None:
    """Return the whole of ``tensor`` on rank 0; collective over the ranks of ``source`` and rank 0."""
    board.moved()
    rank, first = dist.get_rank(), source.ranks[0]
    whole = None
    if rank in source.ranks:
        assert tensor is not None, "each rank of the group holds the tensor"
        whole = _joined(tensor.detach(), source)
    if first == 0 or rank not in (0, first):
        return whole if rank == 0 else None
    group = parallel_state.get_pipeline_control_group()
    if rank == first:
        assert whole is not None, "the first rank of the group joins the parts"
        for piece in _pieces(whole):
            with Wait("tensors of the model for rank 0", ranks=[0]):
                group.send([piece], dist.get_group_rank(group, 0), _TAG).wait()
        return None
    held = source.parts[0]
    received = torch.empty(held.placement.shape, dtype=held.dtype, device="cpu")
    for piece in _pieces(received):
        with Wait("tensors of the model for rank 0", ranks=[first]):
            group.recv([piece], dist.get_group_rank(group, first), _TAG).wait()
    return received


def _joined(tensor: torch.Tensor, source: _Source) -> torch.Tensor | None:
    """Join the parts of ``tensor`` in host memory on the first rank of ``source``; collective over its ranks."""
    placement = source.parts[0].placement
    is_divided, of_experts = placement.dim >= 0, source.parts[0].of_experts
    group = parallel_state.get_expert_model_parallel_group() if of_experts else None
    gathered = all_gather(tensor, 0, group) if is_divided else tensor
    if dist.get_rank() != source.ranks[0]:
        return None
    device = device_of(gathered.device)
    host = gathered.clone() if gathered.device.type == "cpu" else device.to_host(gathered)()
    if not is_divided:
        return host.contiguous()
    whole = torch.empty(placement.shape, dtype=host.dtype, device="cpu")
    for part, held in zip(host.chunk(len(source.ranks)), source.parts, strict=True):
        for block in held.placement.blocks(part):
            whole[block.region] = block.values
    return whole


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The bytes of a contiguous ``tensor`` in messages; none for a tensor without elements."""
    return tensor.view(-1).view(torch.uint8).split(_PIECE_BYTES) if prod(tensor.shape) else []
