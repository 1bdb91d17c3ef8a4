"""Bucket of parameters, of which each data-parallel rank keeps an equal part for its optimizer.

The parameters lie one after the other in a flat vector, padded to a multiple of the ranks. For two ranks::

    flat vector      a a a a a a b b b b c c c ·
    rank 0           a a a a a a b
    rank 1                         b b b c c c ·

Gradients are reduce-scattered in this layout, and parameters all-gathered. The pieces are what the optimizer sees. The
flat vectors are in host memory where the group cannot send from the parameters' device.

With several groups of ranks the ranks of a group share the parameters. Gradients are all-reduced over all ranks. So
they are where ``.grad`` gets the result too. Experts that ranks share have buckets of their own, over the ranks with
the same experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.counted import counted
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.buckets import Combination, Hook, SentBucket, begin, cut, places_in, unpack
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.gradient_dtype import gradient_dtype, master_dtype, take_changes, zero_gradient
from nxdpp.ranks import current_state, parallel_state
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import from_wire, needs_host

# torch 2.13 names them anew, and warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Member:
    """A parameter of an optimizer: its index over all groups, its group, and its name where one is given."""

    parameter: nn.Parameter
    index: int
    group: int
    name: str | None = None


@dataclass(eq=False)
class ShardedPiece:
    """Elements ``start`` to ``stop`` of a flattened parameter, at ``offset`` of the rank's part of the bucket.

    ``tensor`` has the values that the optimizer changes, a view of the parameter, or of a master copy. Its shape is
    ``(stop - start,)``. For a parameter without dimensions it is ``()``: the optimizer's state has its shape too.
    """

    member: Member
    start: int
    stop: int
    offset: int
    tensor: nn.Parameter = field(repr=False)


@dataclass(frozen=True)
class Sharding:
    """The data-parallel ranks that share the parameters; ``group`` is not used for one rank.

    Where the data-parallel ranks are several ``groups``, ``everyone`` is the group of all of them.

    The values that the optimizer changes have ``dtype``, by default at least float32. ``accumulated`` is the dtype of
    ``.grad``, and ``averaged`` of the messages with gradients, where they have more bits than the parameter.
    ``mean`` is ``False`` for sums of gradients. With ``whole`` all of ``.grad`` is reduced, not only the pieces.
    ``is_of_experts`` where the ranks have the same experts.
    """

    rank: int
    size: int
    group: ProcessGroup | None
    dtype: torch.dtype | None = None
    accumulated: torch.dtype | None = None
    averaged: torch.dtype | None = None
    mean: bool = True
    groups: int = 1
    everyone: ProcessGroup | None = None
    whole: bool = False
    is_of_experts: bool = False

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks."""
        return self.size * self.groups

    @staticmethod
    def ranks_of(groups: int) -> tuple[int, int, ProcessGroup | None, ProcessGroup | None]:
        """Return ``rank``, ``size``, ``group`` and ``everyone`` for ``groups``, which must divide the replicas."""
        replicas = parallel_state.get_replica_size()
        if groups < 1 or replicas % groups:
            raise ValueError(f"sharding_groups={groups} must divide the {counted(replicas, 'data-parallel rank')}.")
        everyone = parallel_state.get_replica_group() if replicas > 1 else None
        size, group = replicas // groups, everyone
        if groups > 1:
            group = current_state.with_groups().part_of_data_group(groups) if size > 1 else None
        return parallel_state.get_replica_rank() % size, size, group, everyone

    def of_experts(self) -> Self:
        """Return the sharding over the ranks with the same experts, in one group."""
        rank, size = parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_size()
        group = parallel_state.get_expert_data_parallel_group() if size > 1 else None
        return replace(self, rank=rank, size=size, group=group, everyone=group, groups=1, is_of_experts=True)

    def combination(self, before: Sequence[Hook]) -> Combination:
        """Return how the gradients of the ranks become one, after ``before``."""
        if self.mean or not self.is_of_experts:
            return Combination(self.replicas if self.mean else 1, before)
        # They are the mean over the ranks that share the experts.
        size = parallel_state.get_expert_model_parallel_size()
        return Combination(1, [partial(torch.Tensor.mul_, other=size), *before])


class ShardedBucket:
    """Parameters of one dtype and device, and this rank's part of them.

    ``members`` are in the order of the flat vector. Padding belongs to none of the ``pieces``.
    """

    def __init__(self, members: Sequence[Member], sharding: Sharding) -> None:
        self.members = list(members)
        self._sharding = sharding
        first = members[0].parameter
        self._dtype, self._device = first.dtype, first.device
        own = gradient_dtype(first)
        self.averaged_dtype = own if sharding.averaged is None else torch.promote_types(own, sharding.averaged)
        self._parameters = [member.parameter for member in members]
        self._shard_numel = -(-sum(parameter.numel() for parameter in self._parameters) // sharding.size)
        self._is_through_host = sharding.everyone is not None and needs_host(first, sharding.everyone)
        self._wire = torch.device("cpu") if self._is_through_host else self._device
        dtype = master_dtype(self._dtype, sharding.dtype)
        self._values_dtype = dtype
        # A view of a lazy device has no memory in common with its parameter: each piece is a copy, without the vector.
        self._is_lazy = device_of(self._device).is_lazy
        self._master: torch.Tensor | None = None
        is_view = dtype == self._dtype and all(member.parameter.is_contiguous() for member in members)
        if not is_view and not self._is_lazy:
            self._master = torch.zeros(self._shard_numel, dtype=dtype, device=self._device)
        self.pieces = list(self._cut())

    def follow(self) -> None:
        """Follow parameters whose values or memory a program has changed; another dtype or device is an error."""
        for piece in self.pieces:
            parameter = piece.member.parameter
            if (parameter.dtype, parameter.device) != (self._dtype, self._device):
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} was {self._dtype} on {self._device} when its "
                    f"optimizer was made, and is {parameter.dtype} on {parameter.device}: make the optimizer after the "
                    f"model is moved."
                )
            values = _part(parameter, piece.start, piece.stop)
            if self._is_lazy:
                take_changes(piece.tensor, values)
            elif self._master is None and piece.tensor.data_ptr() != values.data_ptr():
                piece.tensor.data = values
        if self._master is not None and self.pieces:
            # A change of parameter.data leaves no other trace. The pieces lie one after the other.
            present = torch.cat([_flat(piece.member.parameter)[piece.start : piece.stop] for piece in self.pieces])
            take_changes(self._master[: present.numel()], present)

    def start_reduction(
        self, present: Sequence[bool], before: Sequence[Hook] = (), after: Sequence[Hook] = ()
    ) -> SentBucket:
        """Start to average or sum the gradients over the ranks, for the pieces; missing ones count as zeros.

        Pieces whose parameter is ``present`` on no rank get none. ``before`` has functions of the flat vector, which
        run before the division, and ``after`` functions of this rank's part of the result, or of all of it (``whole``).
        """
        sharding, size = self._sharding, self._sharding.size
        combination = sharding.combination(before)
        gradients = [m.parameter.grad for m in self.members if m.parameter.grad is not None]
        is_summed_whole = size == 1 or sharding.groups > 1 or sharding.whole
        new = torch.zeros if is_summed_whole else torch.empty
        whole = new((size if is_summed_whole else 1, self._shard_numel), dtype=self.averaged_dtype, device=self._wire)
        reduced = whole[sharding.rank if is_summed_whole else 0]

        def scatter(gradients: Sequence[torch.Tensor]) -> dist.Work | None:
            flat = whole.view(-1)
            if not is_summed_whole:
                flat = torch.zeros(self._shard_numel * size, dtype=self.averaged_dtype, device=self._wire)
            places = zip(self.members, places_in(flat, self._parameters), strict=True)
            combination.pack(gradients, [place for m, place in places if m.parameter.grad is not None], flat)
            if sharding.replicas == 1:
                return None
            work: dist.Work | None
            if is_summed_whole:
                work = dist.all_reduce(flat, group=sharding.everyone, async_op=True)
            else:
                work = _reduce_scatter(reduced, flat, group=sharding.group, async_op=True)
            return work

        def take(result: torch.Tensor) -> None:
            part = result
            if sharding.whole:
                part = reduced
                self._take_whole(result, present)
            for piece in self.pieces:
                if present[piece.member.index]:
                    own = part[piece.offset : piece.offset + piece.stop - piece.start]
                    # A view of the whole vector would keep all of it.
                    own = own.to(piece.tensor.dtype, copy=sharding.whole)
                    piece.tensor.grad = from_wire(own.view_as(piece.tensor), self._device)

        work = begin(gradients, self._is_through_host, scatter)
        result = whole.view(-1) if sharding.whole else reduced
        return SentBucket(result, work, Wait("average of the gradients", sharding.everyone), take, after)

    def gradients(self) -> Iterator[torch.Tensor]:
        """The reduced gradients: of the pieces, and with ``whole`` the ``.grad`` of the parameters."""
        holders = [*(piece.tensor for piece in self.pieces), *(self._parameters if self._sharding.whole else ())]
        return (holder.grad for holder in holders if holder.grad is not None)

    def take_whole_gradients(self) -> None:
        """Give the pieces what a program has changed in ``.grad``: through ``.data`` it leaves no other trace."""
        for piece in self.pieces:
            gradient = piece.member.parameter.grad
            if piece.tensor.grad is not None and gradient is not None:
                take_changes(piece.tensor.grad, _part(gradient, piece.start, piece.stop))

    def drop_gradients(self) -> None:
        """Free the gradients of the pieces."""
        for piece in self.pieces:
            piece.tensor.grad = None

    def start_gathering(self) -> SentBucket:
        """Start to give the parameters of all ranks the values of the pieces.

        Frees the gradients of the pieces, unless ``.grad`` of the parameters has them too.
        """
        if not self._sharding.whole:
            self.drop_gradients()
        size = self._sharding.size
        flat = torch.empty(self._shard_numel * size, dtype=self._dtype, device=self._wire)

        def gather(values: Sequence[torch.Tensor]) -> dist.Work | None:
            own = flat if size == 1 else torch.zeros(self._shard_numel, dtype=self._dtype, device=self._wire)
            for piece, value in zip(self.pieces, values, strict=True):
                own[piece.offset : piece.offset + piece.stop - piece.start] = value
            if size == 1:
                return None
            work: dist.Work | None = _all_gather(flat, own, group=self._sharding.group, async_op=True)
            return work

        def take(result: torch.Tensor) -> None:
            unpack(result, [parameter.detach() for parameter in self._parameters])

        values = [piece.tensor.detach() for piece in self.pieces]
        work = begin(values, self._is_through_host, gather)
        return SentBucket(flat, work, Wait("new parameters", self._sharding.group), take)

    def masters(self) -> Iterator[ShardedPiece]:
        """The pieces that are not views of their parameters."""
        return iter(self.pieces if self._master is not None or self._is_lazy else ())

    def _take_whole(self, flat: torch.Tensor, present: Sequence[bool]) -> None:
        """Copy the result, of shape (elements,), to ``.grad`` of the parameters that are ``present``."""
        for member, place in zip(self.members, places_in(flat, self._parameters), strict=True):
            if present[member.index]:
                parameter = member.parameter
                if parameter.grad is None:
                    parameter.grad = zero_gradient(parameter)
                parameter.grad.copy_(from_wire(place.view_as(parameter), self._device))

    def _cut(self) -> Iterator[ShardedPiece]:
        begin = self._sharding.rank * self._shard_numel
        at = 0
        for member in self.members:
            numel = member.parameter.numel()
            start, stop = max(begin - at, 0), min(begin + self._shard_numel - at, numel)
            if start < stop:
                values = _part(member.parameter, start, stop)
                offset = at + start - begin
                if self._is_lazy:
                    values = values.to(self._values_dtype, copy=True)
                elif self._master is not None:
                    own = self._master[offset : offset + stop - start]
                    values = own.view_as(values).copy_(values)
                yield ShardedPiece(member, start, stop, offset, nn.Parameter(values))
            at += numel


def make_buckets(members: Sequence[Member], sharding: Sharding, limit: int) -> list[ShardedBucket]:
    """Return buckets of up to ``limit`` bytes, or of a single larger parameter; the same on all replicas."""
    alike: dict[tuple[torch.dtype, torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    for member in members:
        parameter = member.parameter
        kind = (parameter.dtype, gradient_dtype(parameter), parameter.device, is_of_experts(parameter))
        alike.setdefault(kind, []).append(parameter)
    member_of = {id(member.parameter): member for member in members}
    return [
        ShardedBucket(
            [member_of[id(parameter)] for parameter in bucket], sharding.of_experts() if of_experts else sharding
        )
        for (*_, of_experts), parameters in alike.items()
        for bucket in cut(parameters, limit)
    ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order, a view where the tensor is contiguous."""
    return tensor.detach().reshape(-1)


def _part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of the values; a tensor without dimensions as it is."""
    return _flat(tensor)[start:stop] if tensor.dim() else tensor.detach()
