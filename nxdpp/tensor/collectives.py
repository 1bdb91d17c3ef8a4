"""Collective operations of a tensor group along one dimension, by torch's functional collectives.

Over gloo a gather is ``all_gather`` (``_gathered`` has the reason).

A collective that is started returns at once: the operations of ``torch.ops._c10d_functional`` give a tensor whose
content comes later, and ``wait`` waits for it. Tensors without values (meta tensors, the fake tensors of a trace) get
results of the right shape, and nothing is sent.

gloo's threads hold the tensors of a collective a little longer than its ``wait``, and may free them last. They get the
input without its graph. An ``autograd.Function`` whose forward returns a result returns ``outside_of_graph`` of it: the
result itself would get the graph. So no thread of gloo ever frees a part of a graph.

In a module that ``torch.compile`` compiles, a collective is the operation ``nxdpp::collective`` of the graph. It calls
the function here. So compiled code shows its waits too. A backend keeps the order of these operations, by which ranks
pair their messages.

A device tensor whose group is gloo's passes through host memory, and its collective is finished when it is started. On
a device that records operations it is the end of a graph: all operations before it are submitted once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.devices.collective_bytes import note_collective
from nxdpp.devices.kinds import device_of
from nxdpp.ground.torch_names import COLLECTIVES, EFFECT, GROUP_OF_NAME, KEEP_ORDER
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, on_wire, wire_device

_WAIT = Wait("collective of a tensor-parallel layer")
_sends = True


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Give zeros, or the input, of the right shape inside, for the seconds of one rank's own work."""
    global _sends
    _sends = False
    try:
        yield
    finally:
        _sends = True


def size_of(group: ProcessGroup | None) -> int:
    """Number of ranks of ``group``; ``None`` stands for this rank's tensor group."""
    return parallel_state.get_tensor_model_parallel_size() if group is None else dist.get_world_size(group)


def rank_in(group: ProcessGroup | None) -> int:
    """This rank's index in ``group``; ``None`` stands for its tensor group."""
    return parallel_state.get_tensor_model_parallel_rank() if group is None else dist.get_rank(group)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the started collective that fills ``tensor``, and return it; nothing to wait for is no error."""
    # A tensor of a lazy device passes through host memory, and its collective is finished.
    if has_values(tensor) and not device_of(tensor.device).is_lazy:
        board.wait = _WAIT
        COLLECTIVES.found.wait_tensor(tensor)
        board.wait = None
        board.moved()
    return tensor


def all_reduce(
    tensor: torch.Tensor, group: ProcessGroup | None = None, operation: Literal["sum", "max"] = "sum"
) -> torch.Tensor:
    """Return the sum or the maximum over ``group``, as a new tensor."""
    if size_of(group) == 1:
        return tensor
    if torch.compiler.is_dynamo_compiling():
        return _in_graph(operation, tensor, 0, group)
    return wait(start_all_reduce(tensor.clone(memory_format=torch.contiguous_format), group, operation))


def start_all_reduce(
    tensor: torch.Tensor, group: ProcessGroup | None = None, operation: Literal["sum", "max"] = "sum"
) -> torch.Tensor:
    """Start ``all_reduce``, in the memory of ``tensor`` if possible; the content of the result comes later."""
    tensor = tensor.contiguous()
    size = size_of(group)
    if size > 1:
        note_collective("all_reduce", tensor.nbytes, size)
    if size > 1 and has_values(tensor):
        return _start(tensor, group, "all_reduce_", operation)
    return tensor


def all_gather(tensor: torch.Tensor, dim: int, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return the tensors of all ranks of ``group``, joined along ``dim``."""
    size = size_of(group)
    if size == 1:
        return tensor
    dim = dim % tensor.dim()
    if torch.compiler.is_dynamo_compiling():
        return _in_graph("all_gather", tensor, dim, group)
    shape = list(tensor.shape)
    shape[dim] *= size
    note_collective("all_gather", tensor.nbytes * size, size)
    if not has_values(tensor):
        return _without_values(tensor, shape)
    joined = _gathered(outside_of_graph(tensor.contiguous()), size, group)
    if dim == 0:
        return joined
    return joined.view(size, *tensor.shape).movedim(0, dim).reshape(shape)


def reduce_scatter(tensor: torch.Tensor, dim: int, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum over ``group``.

    Raises ``ValueError`` for a size that does not divide.
    """
    if torch.compiler.is_dynamo_compiling() and size_of(group) > 1:
        dim = dim % tensor.dim()
        _part_size(tensor, dim, size_of(group))
        return _in_graph("reduce_scatter", tensor, dim, group)
    return wait(start_reduce_scatter(tensor, dim, group))


def start_reduce_scatter(tensor: torch.Tensor, dim: int, group: ProcessGroup | None = None) -> torch.Tensor:
    """Start ``reduce_scatter``; the content of the result comes later."""
    size = size_of(group)
    if size == 1:
        return tensor
    dim = dim % tensor.dim()
    shape = list(tensor.shape)
    shape[dim] = _part_size(tensor, dim, size)
    note_collective("reduce_scatter", tensor.nbytes, size)
    if not has_values(tensor):
        return _without_values(tensor, shape)
    # The parts of the ranks lie one after the other.
    parts = tensor.unflatten(dim, (size, shape[dim])).movedim(dim, 0).reshape(size * shape[0], *shape[1:])
    given = outside_of_graph(parts.contiguous())
    return _start(given, group, "reduce_scatter_tensor", "sum", size)


def own_part(tensor: torch.Tensor, dim: int, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return a copy of this rank's part of ``tensor`` along ``dim``; nothing is sent.

    Raises ``ValueError`` for a size that does not divide.
    """
    size = size_of(group)
    if size == 1:
        return tensor
    dim = dim % tensor.dim()
    part = _part_size(tensor, dim, size)
    # A copy: a view would keep the whole alive.
    return tensor.narrow(dim, rank_in(group) * part, part).clone(memory_format=torch.contiguous_format)


def outside_of_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of ``tensor``, of its shape, that has no graph and gets none with it."""
    return tensor.detach()


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has values to send; meta and fake tensors have none."""
    return _sends and not (tensor.is_meta or type(tensor).__name__ == "FakeTensor")


def _without_values(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    # Layers compute on it where nothing is sent, and old memory may have denormal numbers, which are slow.
    return tensor.new_empty(shape) if _sends else tensor.new_zeros(shape)


def _part_size(tensor: torch.Tensor, dim: int, size: int) -> int:
    if tensor.shape[dim] % size:
        raise ValueError(
            f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} does not divide by the tensor-parallel size: "
            f"{tensor.shape[dim]} = {size} * {tensor.shape[dim] // size} + {tensor.shape[dim] % size}. Pad it to a "
            f"multiple of {size}."
        )
    return tensor.shape[dim] // size


def _start(tensor: torch.Tensor, group: ProcessGroup | None, collective: str, *arguments: str | int) -> torch.Tensor:
    """Start a collective of ``tensor`` over ``group``; one that passes through host memory is finished."""
    board.moved()
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    message = on_wire(tensor, group)
    started: torch.Tensor = getattr(COLLECTIVES.found, collective)(message, *arguments, str(group.group_name))
    return started if message is tensor else device_of(tensor.device).from_host(wait(started))


def _gathered(tensor: torch.Tensor, size: int, group: ProcessGroup | None) -> torch.Tensor:
    """Return the tensors of the ``size`` ranks of ``group``, one after the other along dimension 0."""
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    if wire_device(tensor.device, group).type != "cpu":
        return wait(_start(tensor, group, "all_gather_into_tensor", size))
    # Two threads of gloo note the names of the collectives that they finish in one string, without a lock (torch 2.9
    # to 2.15). A name of over 15 letters lies on the heap, and a thread may write into memory that the other has freed.
    # all_gather_into_tensor has such a name, all_gather has none.
    message = on_wire(tensor, group)
    joined = message.new_empty((size, *message.shape))
    board.moved()
    board.wait = _WAIT
    dist.all_gather(list(joined.unbind()), message, group=group)
    board.wait = None
    board.moved()
    return from_wire(joined.flatten(0, 1), tensor.device)


def _in_graph(kind: str, tensor: torch.Tensor, dim: int, group: ProcessGroup | None) -> torch.Tensor:
    joined: torch.Tensor = torch.ops.nxdpp.collective(tensor, kind, dim, "" if group is None else group.group_name)
    return joined


def _group_of(name: str) -> ProcessGroup | None:
    return GROUP_OF_NAME(name) if name else None


@torch.library.custom_op("nxdpp::collective", mutates_args=())
def _collective(tensor: torch.Tensor, kind: str, dim: int, group: str) -> torch.Tensor:
    """Run a collective of compiled code over the group of a name; the empty name stands for this rank's tensor group.

    ``kind`` is ``"all_gather"`` or ``"reduce_scatter"`` along ``dim``, or the operation of an all-reduce.
    """
    members = _group_of(group)
    if kind == "all_gather":
        return all_gather(tensor, dim, members)
    if kind == "reduce_scatter":
        return reduce_scatter(tensor, dim, members)
    assert kind in ("sum", "max"), kind
    return all_reduce(tensor, members, "max" if kind == "max" else "sum")


@_collective.register_fake
def _collective_shape(tensor: torch.Tensor, kind: str, dim: int, group: str) -> torch.Tensor:
    """Return a tensor without values of the result's shape."""
    size = size_of(_group_of(group))
    shape = list(tensor.shape)
    if kind == "all_gather":
        shape[dim] *= size
    elif kind == "reduce_scatter":
        shape[dim] //= size
    return tensor.new_empty(shape)


# ``apply_compile`` refuses a divided model without them.
if KEEP_ORDER.exists and EFFECT.exists:
    KEEP_ORDER(torch.ops.nxdpp.collective.default, EFFECT.found.ORDERED)
