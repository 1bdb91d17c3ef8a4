"""Norm and clipping of the gradients of the whole model, over all ranks that hold a part of it.

A gradient that several ranks have counts once. ``counted_share`` gives the share that each of them adds::

    parameter                                    tensor ranks 0, 1      pipeline ranks 0, 3
    on each tensor rank (a norm)                 1/2  1/2
    split over them (tensor_model_parallel)      1    1
    tied over pipeline ranks (shared)                                   1    0
    rows of it (fully_shard)                     1 on each rank of a shard group
    experts of it (expert_parallelize)           1 on each rank of an expert group

Data-parallel replicas have equal gradients once these are averaged, so the norm of one replica is the model's norm.
With ``fully_shard`` the norm is collective over the ranks of a shard group too, and with experts over ranks over all
replicas: of a gradient that several of them have each adds its share.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.gradient_dtype import dense
from nxdpp.gradients.shards.local_tensors import LocalGradient, is_sharded, local_rows
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, on_wire


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
    *,
    error_if_nonfinite: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Scale the gradients of the whole model in place so that their norm is ``max_norm`` at most; return the norm.

    Collective as ``get_grad_norm`` is. The result equals ``torch.nn.utils.clip_grad_norm_`` on the unwrapped model, to
    rounding.

    Args:
        parameters, norm_type, zero1_optimizer, zero1_optimizer_groups, force_spmd: as of ``get_grad_norm``.
        max_norm: largest norm, above 0. Infinity only measures.
        error_if_nonfinite: raise if the norm is NaN or infinite, on all ranks alike. The rank then waits for its
            device.
        dtype: of the norm; that of the widest gradient of this rank by default.

    Returns:
        The norm before clipping, as ``get_grad_norm`` does.

    Raises:
        ValueError: for an invalid ``max_norm``, and as ``get_grad_norm`` does.
        RuntimeError: in the debug mode, before ``initialize_model_parallel``, and for ``error_if_nonfinite``.
    """
    if not float(max_norm) > 0:
        raise ValueError(f"max_norm must be above 0, not {max_norm!r}. float('inf') measures and does not clip.")
    trained = _trained(parameters)
    _refuse_pieces(zero1_optimizer or zero1_optimizer_groups is not None)
    norm = _norm_of("clip_grad_norm", trained, norm_type, dtype)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients of the whole model is {norm.item()}. Look for the layer or the loss that is "
            f"not finite; error_if_nonfinite=False clips all the same."
        )
    if max_norm != math.inf:
        rows: Any = [LocalGradient(local_rows(each.grad)) for each in trained if each.grad is not None]
        nn.utils.clip_grads_with_norm_(rows, max_norm, norm)
    return norm


@torch.no_grad()
def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> torch.Tensor:
    """Return the norm of the gradients of the whole model.

    Collective over the tensor and pipeline ranks of a replica: each gives its own parameters, and calls it even if it
    has none. Gradients must be ready for the step: averaged over replicas, and unscaled (``scaler.unscale_``).

    Args:
        parameters: of this rank. One that is given twice counts once.
        norm_type: order of the norm, above 0; infinity is for the largest absolute value.
        zero1_optimizer, zero1_optimizer_groups: ``False`` and ``None``: ``Zero1Optimizer`` has the norm of its pieces.
        force_spmd: NeuronX Distributed counts a gradient that all tensor ranks have in shares for ``True``, and on the
            first rank for ``False``. Both give the same norm; it is added up in float64.

    Returns:
        A tensor without dimensions on the device of the gradients, equal on all ranks: float64 where this rank has a
        gradient in float64, as by torch, and float32 otherwise.

    Raises:
        ValueError: for an invalid ``norm_type``, for sparse gradients, and for ``zero1_optimizer``.
        RuntimeError: in the debug mode, and before ``initialize_model_parallel``.
    """
    _refuse_pieces(zero1_optimizer or zero1_optimizer_groups is not None)
    return _norm_of("get_grad_norm", _trained(parameters), norm_type)


def _trained(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters with a gradient, each once."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return list({id(each): each for each in listed if each.grad is not None}.values())


def _refuse_pieces(is_asked: bool) -> None:
    if is_asked:
        raise ValueError(
            "zero1_optimizer=True and zero1_optimizer_groups are not supported: call optimizer.gradient_norm() or "
            "clip_gradients() of Zero1Optimizer. Give torch's error_if_nonfinite by name."
        )


def _norm_of(
    caller: str, trained: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be above 0 or infinity, not {norm_type!r}: 2 is the Euclidean norm.")
    parallel_state.refuse_in_debug(caller)
    gradients = [local_rows(dense(each.grad, each, "clipped")) for each in trained if each.grad is not None]
    shares = [counted_share(each) for each in trained]
    groups = [parallel_state.get_model_parallel_group()]
    with_experts = parallel_state.get_expert_model_parallel_size() > 1
    if with_experts or parallel_state.has_shards():
        # Each rank has other rows of a sharded gradient, its copy of experts, and all of any other gradient.
        whole = parallel_state.get_replica_group()
        ranks = whole if with_experts else parallel_state.get_shard_mesh().get_group(-1)
        shares = [share / _copies(each, ranks) for share, each in zip(shares, trained, strict=True)]
        groups.append(ranks)
    with board.call(caller), failure_watch.reported():
        return total_norm(gradients, shares, order, groups, dtype)


def _copies(parameter: torch.Tensor, ranks: ProcessGroup) -> int:
    """Return how many of ``ranks`` have the same gradient of ``parameter``."""
    if is_sharded(parameter):
        return 1
    of_experts = is_of_experts(parameter)
    return parallel_state.get_expert_data_parallel_size() if of_experts else dist.get_world_size(ranks)


def counted_share(parameter: torch.Tensor) -> float:
    """Return the share of the gradient of ``parameter`` that this rank adds to the norm of its replica.

    Reads NxD's attributes: ``shared``, ``tensor_model_parallel`` and ``num_partitions``.
    """
    if getattr(parameter, "shared", False):
        return 0.0
    size = parallel_state.get_tensor_model_parallel_size()
    if not getattr(parameter, "tensor_model_parallel", False):
        return 1 / size
    # Fewer partitions than ranks: several ranks hold each of them, as with kv_size_multiplier.
    return min(1.0, getattr(parameter, "num_partitions", size) / size)


def dtype_of_norm(gradients: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the norm of ``gradients``: that of torch, but not narrower than float32."""
    is_wide = any(each.dtype in (torch.float64, torch.complex128) for each in gradients)
    return torch.float64 if is_wide else torch.float32


def total_norm(
    gradients: Sequence[torch.Tensor],
    shares: Sequence[float],
    norm_type: float,
    groups: Sequence[ProcessGroup],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of ``groups``, without a wait for the device.

    Collective over ``groups``, with one all-reduce of one number in each group of several ranks. Each rank that adds
    gradients is reached through one group after the other. The ``shares`` of a gradient over all ranks that have it sum
    to 1. ``dtype`` is that of the result, by default that of ``gradients``.
    """
    dtype = dtype or dtype_of_norm(gradients)
    device = gradients[0].device if gradients else parallel_state.local_device()
    is_largest = norm_type == math.inf
    # In float64: the square of a large norm, or the tenth power of a small one, is out of float32's range.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for share, norms in _norms(gradients, shares, norm_type, device):
        # torch.maximum keeps NaN, as torch's norm does.
        total = torch.maximum(total, norms.amax()) if is_largest else total + norms.pow(norm_type).sum() * share
    if not is_largest:
        return _over(groups, total, dist.ReduceOp.SUM).pow(1 / norm_type).to(dtype)
    # gloo's maximum of NaN and a number may be the number: NaN goes along as a flag.
    largest, is_nan = _over(
        groups, torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan()]), dist.ReduceOp.MAX
    )
    return torch.where(is_nan > 0, math.nan, largest).to(dtype)


def _norms(
    gradients: Sequence[torch.Tensor], shares: Sequence[float], norm_type: float, device: torch.device
) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield shares with the norms of their gradients: float64 of shape (number of gradients,) on ``device``."""
    alike: dict[tuple[torch.device, torch.dtype, float], list[torch.Tensor]] = {}
    for gradient, share in zip(gradients, shares, strict=True):
        # The largest value of an empty tensor is an error in torch.
        if share and gradient.numel():
            alike.setdefault((gradient.device, gradient.dtype, share), []).append(gradient)
    for (_, dtype, share), group in alike.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        yield share, torch.stack(torch._foreach_norm(group, norm_type, dtype=wide)).to(device, torch.float64)


def _over(groups: Sequence[ProcessGroup], value: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    device = value.device
    for group in groups:
        if dist.get_world_size(group) > 1:
            value = on_wire(value, group)
            with Wait("norm of the gradients", group):
                dist.all_reduce(value, operation, group)
    return from_wire(value, device)
