"""Average or sum of the gradients over the data-parallel ranks.

Gradients are packed into flat buckets with one all-reduce each. The method is that of "PyTorch Distributed: Experiences
on Accelerating Data Parallel Training" (Li et al., 2020). ``overlapped_average`` starts buckets during the backward.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.devices.kinds import device_of
from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.gradient_dtype import zero_gradient
from nxdpp.parallel_layers.host_wire import HostWork, begin_on_host, needs_host

_BUCKET_BYTES = 25 * 2**20

# One bucket is sent while the next one is packed; more would only take memory.
_BUCKETS_IN_FLIGHT = 2

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

Memory = Callable[[torch.device, int], torch.Tensor]
"""A function of a device and a number of bytes that gives uint8 memory."""


Hook = Callable[[torch.Tensor], object]
"""A function that may change a flat bucket, of shape (elements,), in place."""


class Work(Protocol):
    """A collective in flight."""

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""
        ...

    def wait(self) -> object:
        """Block until the collective is finished."""
        ...


@dataclass(frozen=True)
class Combination:
    """Sum or mean of the ranks' gradients: ``before`` of each rank's own, division, sum, ``after`` of the result.

    ``divisor`` is the number of ranks for a mean, and 1 for a sum.
    """

    divisor: int
    before: Sequence[Hook] = ()
    after: Sequence[Hook] = ()

    @staticmethod
    def over(group: ProcessGroup, mean: bool) -> "Combination":
        """The mean over ``group``, or the sum."""
        return Combination(dist.get_world_size(group) if mean else 1)


@dataclass(frozen=True)
class Reduction:
    """A bucket whose all-reduce is in flight.

    ``flat`` is in host memory for gradients that cannot be sent from their device. ``after`` is run on the result.
    """

    gradients: list[torch.Tensor]
    flat: torch.Tensor
    work: Work
    is_in_place: bool = False
    after: Sequence[Hook] = ()

    @property
    def copied_bytes(self) -> int:
        """Memory of the flat copy; 0 for a sum in place."""
        return 0 if self.is_in_place else self.flat.nbytes

    def wait_begun(self) -> None:
        """Block until the message is in flight: a later one over the same group then follows it."""
        if isinstance(self.work, HostWork):
            self.work.wait_begun()

    def finish(self) -> None:
        """Wait for the result and copy it back into the gradients."""
        self.work.wait()
        for hook in self.after:
            hook(self.flat)
        if self.is_in_place:
            return
        parts = self.flat.split([gradient.numel() for gradient in self.gradients])
        device = device_of(self.gradients[0].device)
        for gradient, part in zip(self.gradients, parts, strict=True):
            if self.flat.device == gradient.device:
                gradient.copy_(part.view_as(gradient))
            else:
                device.fill(gradient, part.view_as(gradient))


def average_gradients(
    parameters: Iterable[nn.Parameter],
    group: ProcessGroup,
    control: ProcessGroup,
    notes: Sequence[int] = (),
    check: Callable[[list[int]], None] | None = None,
    mean: bool = True,
) -> None:
    """Replace each parameter's ``.grad`` by its mean over ``group``, or its sum; collective over ``group``.

    ``control`` is a group over the same ranks that takes CPU tensors: hosts tell each other over it which gradients
    they have, without a wait for their devices.

    All ranks must give the same parameters in the same order. Parameters without ``requires_grad`` are skipped. A
    gradient that is ``None`` on some ranks counts as zeros there. One that is ``None`` on all ranks stays ``None``. A
    bucket holds gradients of one dtype and device, up to 25 MiB, or a single larger gradient. Sums are in the
    gradients' dtype.

    ``notes``, numbers of 32 bits, go along in the first message. ``check`` gets the largest of all ranks, and may raise
    before a gradient is sent.

    Raises ``ValueError`` for sparse gradients.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    size = dist.get_world_size(group)
    if size == 1 or not trained:
        return
    largest = largest_flags(trained, control, notes)
    if check is not None:
        check(largest[: len(notes)])
    gradients = gradients_of_any_rank(trained, largest[len(notes) :])
    combine_buckets(buckets(gradients), group, Combination.over(group, mean))


def average_tensors(gradients: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Replace each of ``gradients`` by its mean over ``group``, in place; collective over ``group``.

    All ranks give tensors of the same shapes and dtypes in the same order.
    """
    combine_buckets(buckets(gradients), group, Combination.over(group, mean=True))


def combine_buckets(made: Iterable[list[torch.Tensor]], group: ProcessGroup, combination: Combination) -> None:
    """Replace each gradient of the buckets ``made`` by its ``combination`` over ``group``, in place.

    Collective over ``group``. All ranks give tensors of the same shapes and dtypes in the same order.
    """
    in_flight: deque[Reduction] = deque()
    with torch.no_grad():
        for bucket in made:
            if len(in_flight) == _BUCKETS_IN_FLIGHT:
                in_flight.popleft().finish()
            board.moved()
            in_flight.append(start(bucket, group, combination))
        while in_flight:
            in_flight.popleft().finish()
            board.moved()


def largest_flags(trained: Sequence[nn.Parameter], control: ProcessGroup, notes: Sequence[int] = ()) -> list[int]:
    """Return the largest ``notes`` of all ranks, then 1 for each parameter that has a gradient on any rank, else 0."""
    present = [parameter.grad is not None for parameter in trained]
    flags = torch.tensor([*notes, *present], dtype=torch.int32, device="cpu")
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=control)
    largest: list[int] = flags.tolist()
    return largest


def gradients_of_any_rank(trained: Sequence[nn.Parameter], anywhere: Sequence[int]) -> list[torch.Tensor]:
    """Return the gradients that any rank has, the same list on all ranks; missing ones become zeros on this rank."""
    gradients = []
    for parameter, is_anywhere in zip(trained, anywhere, strict=True):
        if is_anywhere:
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
            gradients.append(dense(parameter.grad, parameter))
    return gradients


def dense(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return ``gradient`` of ``parameter``. Raises ``ValueError`` for a sparse one."""
    if gradient.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be "
            "averaged in buckets: build its embedding with sparse=False"
        )
    return gradient


def buckets(tensors: Iterable[_Tensor], limit: int | None = None) -> Iterator[list[_Tensor]]:
    """Give buckets of one dtype and device with at most ``limit`` bytes, the first full one first.

    ``limit`` is 25 MiB by default. Buckets are the same on all ranks that give tensors of the same shapes in the same
    order.
    """
    limit = _BUCKET_BYTES if limit is None else limit
    filling: dict[tuple[torch.dtype, torch.device], list[_Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket = filling.setdefault(kind, [])
        if bucket and filled[kind] + tensor.nbytes > limit:
            yield bucket
            filling[kind] = bucket = []
        filled[kind] = tensor.nbytes + (filled[kind] if bucket else 0)
        bucket.append(tensor)
    yield from filling.values()


def start(
    bucket: list[torch.Tensor],
    group: ProcessGroup,
    combination: Combination,
    in_place: bool = True,
    memory: Memory | None = None,
) -> Reduction:
    """Start the all-reduce of ``bucket``. With ``in_place`` the only gradient of a bucket is summed in its memory.

    ``memory`` gives a tensor of that many bytes on a device, uint8, for the flat copy: by default a new one.
    """
    if needs_host(bucket[0], group):
        return _start_on_host(bucket, group, combination, memory)
    is_in_place = in_place and len(bucket) == 1 and bucket[0].is_contiguous()
    if is_in_place:
        flat = bucket[0].view(-1)
        _prepare(flat, combination)
    else:
        flat = _flat_memory(bucket, bucket[0].device, memory)
        _pack(bucket, flat, combination)
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return Reduction(bucket, flat, work, is_in_place, combination.after)


def _start_on_host(
    bucket: list[torch.Tensor], group: ProcessGroup, combination: Combination, memory: Memory | None
) -> Reduction:
    """Start the all-reduce of ``bucket`` in host memory, as ``start`` does."""
    flat = _flat_memory(bucket, torch.device("cpu"), memory)

    def collective(copies: list[torch.Tensor]) -> dist.Work | None:
        _pack(copies, flat, combination)
        work: dist.Work | None = dist.all_reduce(flat, group=group, async_op=True)
        return work

    return Reduction(bucket, flat, begin_on_host(bucket, collective), after=combination.after)


def _flat_memory(bucket: list[torch.Tensor], device: torch.device, memory: Memory | None) -> torch.Tensor:
    count = sum(gradient.numel() for gradient in bucket)
    if memory is None:
        return torch.empty(count, dtype=bucket[0].dtype, device=device)
    return memory(device, count * bucket[0].element_size()).view(bucket[0].dtype)


def _pack(gradients: list[torch.Tensor], flat: torch.Tensor, combination: Combination) -> None:
    """Copy ``gradients``, each into its part of ``flat``, and prepare it for the sum."""
    divided_at_once = combination.divisor > 1 and not combination.before
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        if divided_at_once:
            torch.div(gradient.reshape(-1), combination.divisor, out=part)
        else:
            part.copy_(gradient.reshape(-1))
    if not divided_at_once:
        _prepare(flat, combination)


def _prepare(flat: torch.Tensor, combination: Combination) -> None:
    """Run the hooks and the division of ``flat`` before the sum."""
    for hook in combination.before:
        hook(flat)
    if combination.divisor > 1:
        # Divided before they are summed: the sum of many float16 gradients may overflow where their mean does not.
        flat.div_(combination.divisor)
