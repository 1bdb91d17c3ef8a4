"""Values that the first units send to the others, through host memory, and checks that all ranks make together."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp import parallel_state

T = TypeVar("T")


def on_all_ranks(check: Callable[[], T]) -> T:
    """Return the result of ``check`` on this rank, or raise on all ranks; collective over all ranks.

    A rank on which it fails raises its own error, and others one of the same kind that names the rank.
    """
    error: Exception | None = None
    try:
        result = check()
    except (ValueError, TypeError, RuntimeError) as raised:
        error = raised
    report = None if error is None else (isinstance(error, ValueError), str(error))
    reports = parallel_state.get_exchange().gather(report)
    if error is not None:
        raise error
    for rank, failed in enumerate(reports):
        if failed is not None:
            raise (ValueError if failed[0] else RuntimeError)(f"on rank {rank}: {failed[1]}")
    return result


def send(tensor: torch.Tensor, is_everywhere: bool, sources: int = 1) -> None:
    """Give ``tensor`` the values of the first units, in place; collective over the data group.

    Args:
        tensor: a parameter or buffer of this rank.
        is_everywhere: all ranks hold it, and take it from rank 0; collective over all ranks.
        sources: number of units that have values. Unit ``u`` takes those of unit ``u % sources``.
    """
    own = tensor.detach().cpu().contiguous()
    # Bytes: gloo does not know all dtypes.
    taken = own.clone()
    unit = parallel_state.get_data_parallel_rank()
    for source in range(sources):
        message = own.clone() if unit == source else torch.empty_like(own)
        _broadcast(message, parallel_state.get_data_parallel_control_group(), source)
        if unit % sources == source:
            taken = message
    for group in _groups_of_unit() if is_everywhere else []:
        _broadcast(taken, group, 0)
    with torch.no_grad():
        tensor.copy_(taken)


def send_state(values: Mapping[str, Any], is_everywhere: bool) -> dict[str, Any]:
    """Return the optimizer state ``values`` of unit 0 for one parameter; collective over the data group.

    With ``is_everywhere`` it is that of rank 0, and the call collective over all ranks.
    """
    groups = [parallel_state.get_data_parallel_control_group(), *(_groups_of_unit() if is_everywhere else [])]
    for group in groups:
        if dist.get_world_size(group) > 1:
            values = _shared_state(values, group)
    return dict(values)


def _shared_state(values: Mapping[str, Any], group: ProcessGroup) -> dict[str, Any]:
    is_source = dist.get_rank(group) == 0
    # Tensors of one number go with the description.
    described = {key: _Layout.of(value) if _is_large(value) else value for key, value in values.items()}
    objects: list[Any] = [described if is_source else None]
    dist.broadcast_object_list(objects, group=group, group_src=0)
    received: dict[str, Any] = {}
    for key, value in objects[0].items():
        if isinstance(value, _Layout):
            own = values[key].detach().cpu().contiguous() if is_source else None
            message = torch.empty(value.shape, dtype=value.dtype) if own is None else own
            _broadcast(message, group, 0)
            value = values[key] if is_source else message
        received[key] = value
    return received


class _Layout:
    """Shape and dtype of a tensor that follows."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Layout":
        return cls(tuple(tensor.shape), tensor.dtype)


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _groups_of_unit() -> list[ProcessGroup]:
    return [parallel_state.get_pipeline_control_group(), parallel_state.get_tensor_control_group()]


def _broadcast(message: torch.Tensor, group: ProcessGroup, source: int) -> None:
    """Give the contiguous ``message`` in host memory the values of rank ``source`` of ``group``."""
    if dist.get_world_size(group) > 1 and message.numel():
        dist.broadcast(message.view(-1).view(torch.uint8), group=group, group_src=source)
