"""Count of the bytes that a rank hands to collectives and P2P transfers.

Each collective of torch is an operator of the dispatcher. So a dispatch mode sees all of nxdpp, DDP, FSDP2 and DTensor,
but the messages of shared memory, whose send is counted. A collective counts as the bytes that a ring algorithm sends
(``nxdpp.parallel_layers.collective_bytes``), and a send as its bytes.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from nxdpp.devices.collective_bytes import Kind, least_sent
from nxdpp.ranks.host_link import HostLink

# torch has no public way from the name of a group to the group.
_group_by_name: Any = vars(dist.distributed_c10d)["_resolve_process_group"]

_KINDS: dict[str, Kind] = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
}
_SENDS_NOTHING = {
    "c10d::recv_",
    "c10d::barrier",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}
_MESSAGES = {"c10d::send", "c10d::broadcast_"}


class Traffic(TorchDispatchMode):
    """Sum of sent bytes by name of the group, apart for control messages: integers, and float64 for comparisons.

    Models have neither of these dtypes.

    Args:
        dimensions: the dimension of each group, by the group's name.

    Attributes:
        sent: bytes by ``(dimension, kind)``.
        control: bytes of control messages.
        messages: number of all other messages, by dimension.
    """

    def __init__(self, dimensions: dict[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[str] = Counter()
        self.control = 0
        self._dimensions = dimensions
        self._links = ExitStack()

    def of(self, dimension: str) -> float:
        """Return the bytes that this rank has sent in ``dimension``, without control messages."""
        return float(sum(size for (where, _), size in self.sent.items() if where == dimension))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and run the operator. Raises ``NotImplementedError`` for a collective that it does not know."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.name().split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        """Count the messages of shared memory too, which no operator sends."""
        send = HostLink.send

        def counted(link: HostLink, tensor: torch.Tensor, tag: int) -> bool:
            is_sent = send(link, tensor, tag)
            if is_sent:
                self._add(tensor, "pipeline", "send", float(tensor.nbytes))
            return is_sent

        self._links.enter_context(patch.object(HostLink, "send", counted))
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]  # without types in torch

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        self._links.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _count(self, name: str, args: Any) -> None:
        if name in _SENDS_NOTHING:
            return
        if name not in _KINDS and name not in _MESSAGES:
            raise NotImplementedError(f"{name} is not counted: add it to benchmarks/layouts/traffic.py")
        tensors = _tensors(args)
        group = _group(args)
        size = dist.get_world_size(group)
        whole = _whole(name, tensors, args, size)
        sent = least_sent(_KINDS[name], whole, size) if name in _KINDS else float(whole)
        self._add(tensors[0], self._dimensions.get(group.group_name, "other"), _KINDS.get(name, "send"), sent)

    def _add(self, tensor: torch.Tensor, dimension: str, kind: str, sent: float) -> None:
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            self.control += int(sent)
            return
        self.sent[dimension, kind] += sent  # type: ignore[assignment]  # a Counter of floats
        self.messages[dimension] += 1


def _whole(name: str, tensors: list[torch.Tensor], args: Any, size: int) -> int:
    """Bytes of the tensor that is reduced, gathered or sent."""
    if name.startswith("_c10d_functional::all_gather"):
        return tensors[0].nbytes * int(args[1])
    total = sum(tensor.nbytes for tensor in tensors)
    if name.startswith("c10d::") and _KINDS.get(name) in ("all_gather", "reduce_scatter"):
        # Both the whole and a part are arguments.
        return total * size // (size + 1)
    return total


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _group(args: Any) -> dist.ProcessGroup:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:
                continue
    name = next(value for value in reversed(args) if isinstance(value, str))
    return _group_by_name(name)  # type: ignore[no-any-return]  # without types in torch
