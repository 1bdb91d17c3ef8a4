"""Average or sum of gradients over the data-parallel ranks, in flat buckets with one all-reduce each.

``overlapped_average`` begins the buckets during the backwards of a step. ``mean_loss`` is for the losses of a step.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.gradients import buckets
from nxdpp.gradients.expert_parameters import is_of_experts, over_replicas
from nxdpp.gradients.gradient_dtype import dense, gradient_dtype, zero_gradient
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import extremes
from nxdpp.ranks.host_wire import from_wire, needs_host, on_wire, wire_device

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    gradients' dtype. Gradients of experts are summed over the ranks with the same experts (``expert_parameters``).

    ``notes``, numbers of 32 bits, are sent in the first message. ``check`` gets the largest of all ranks, and may raise
    before a gradient is sent.

    Raises ``ValueError`` for sparse gradients.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if dist.get_world_size(group) == 1 or not trained:
        return
    largest = largest_flags(trained, control, notes)
    if check is not None:
        check(largest[: len(notes)])
    anywhere = dict(zip(trained, largest[len(notes) :], strict=True))
    for of_experts in (False, True):
        alike = [each for each in trained if is_of_experts(each) is of_experts]
        if alike:
            gradients = gradients_of_any_rank(alike, [anywhere[each] for each in alike])
            combine(buckets.cut(gradients), *over_replicas(of_experts, mean, group))


def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    group: ProcessGroup,
    control: ProcessGroup,
    *,
    mean: bool = True,
    before: Sequence[buckets.Hook] = (),
    after: Sequence[buckets.Hook] = (),
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> None:
    """Replace each parameter's ``.grad`` by its mean over ``group``, or its sum, in place and in buckets.

    Collective over ``group``. Parameters without ``requires_grad`` are skipped; one that is given twice counts once. A
    gradient that is ``None`` on some ranks counts as zeros there. One that is ``None`` on all ranks stays ``None``.

    Args:
        parameters: the same ones in the same order on all ranks.
        group: the ranks whose gradients become one.
        control: a group over the same ranks that takes CPU tensors.
        mean: ``False`` for the sum.
        before: functions of a flat bucket of this rank's gradients, of shape (elements,), which change it in place.
            They run in their order, before the division of a mean.
        after: functions of the flat bucket of the result, likewise. The result of a function is not used.
        bucket_bytes: largest size of a bucket, unless a single gradient is larger.

    Raises:
        ValueError: for sparse gradients, for experts over ranks, and for ``bucket_bytes`` below 1.
        RuntimeError: for different parameters or a different ``mean`` on some ranks, before anything is changed.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}: the default is {buckets.BUCKET_BYTES}.")
    trained = list({id(each): each for each in parameters if each.requires_grad}.values())
    if any(map(is_of_experts, trained)):
        raise ValueError(
            "reduce_gradients sums over one group, and expert_parallelize has given each rank of an expert group "
            "experts of its own: wrap the model, whose run_train averages the gradients."
        )
    if dist.get_world_size(group) == 1 and not before and not after:
        return
    with failure_watch.reported():
        kinds = [mean, bucket_bytes, *((tuple(each.shape), gradient_dtype(each)) for each in trained)]
        remedy = "Give the same parameters in the same order, with the same requires_grad, on every rank."
        _check_alike(kinds, len(trained), control, "reduce_gradients", "parameters", remedy)
        if not trained:
            return
        gradients = gradients_of_any_rank(trained, largest_flags(trained, control))
        combination = buckets.Combination(dist.get_world_size(group) if mean else 1, before, after)
        combine(buckets.cut(gradients, bucket_bytes), group, combination)


def bucket_allreduce_gradients(grads_list: Sequence[torch.Tensor], reduce_over_ep_group: bool = False) -> None:
    """Replace each gradient by its mean over the data-parallel group, in place and in buckets.

    Collective over the group. All its ranks give gradients of the same shapes and dtypes in the same order. The last
    ones are sent first: a backward computes them first. ``run_train`` averages gradients already, unless it runs in
    ``no_sync()`` or with ``use_zero1_optimizer=True``.

    Args:
        grads_list: dense tensors. One that is given twice is averaged once.
        reduce_over_ep_group: ``False``. Tensors do not tell which are of experts, so nothing is averaged where several
            ranks share experts.

    Raises:
        ValueError: for ``reduce_over_ep_group=True``, for expert parallelism and for sparse tensors.
        TypeError: for something other than a tensor.
        RuntimeError: for different shapes or dtypes on some ranks, before anything is changed.
    """
    if reduce_over_ep_group or parallel_state.get_expert_model_parallel_size() > 1:
        raise ValueError(
            f"bucket_allreduce_gradients does not know which gradients are of experts (reduce_over_ep_group="
            f"{reduce_over_ep_group}, expert_model_parallel_size={parallel_state.get_expert_model_parallel_size()}): "
            f"wrap the model, whose run_train averages them."
        )
    for gradient in grads_list:
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(f"grads_list has {gradient!r:.80} in it: leave out parameters without a gradient.")
        if gradient.layout != torch.strided:
            raise ValueError("grads_list has a sparse gradient: build its embedding with sparse=False.")
    group, control = parallel_state.get_replica_group(), parallel_state.get_replica_control_group()
    if dist.get_world_size(group) > 1:
        gradients = list({id(gradient): gradient for gradient in grads_list}.values())
        with failure_watch.reported():
            kinds = [(tuple(gradient.shape), gradient.dtype) for gradient in gradients]
            remedy = "Give zeros for a parameter that has no gradient on this rank."
            _check_alike(kinds, len(gradients), control, "bucket_allreduce_gradients", "gradients", remedy)
            combine(buckets.cut(gradients[::-1]), group, buckets.Combination.over(group, mean=True))


def combine(parts: Iterable[list[torch.Tensor]], group: ProcessGroup, combination: buckets.Combination) -> None:
    """Replace each gradient of the buckets ``parts`` by its ``combination`` over ``group``, in place; collective.

    All ranks give tensors of the same shapes and dtypes in the same order.
    """
    with torch.no_grad():
        buckets.send_all(partial(start, bucket, group, combination) for bucket in parts)


def start(
    bucket: list[torch.Tensor],
    group: ProcessGroup,
    combination: buckets.Combination,
    in_place: bool = True,
    memory: buckets.Memory | None = None,
) -> buckets.SentBucket:
    """Start the all-reduce of ``bucket``. With ``in_place`` the only gradient of a bucket is summed in its memory.

    ``memory`` returns uint8 memory of a number of bytes on a device, for the flat vector. By default it is new.
    """
    is_through_host = needs_host(bucket[0], group)
    is_in_place = in_place and not is_through_host and len(bucket) == 1 and bucket[0].is_contiguous()
    if is_in_place:
        flat = bucket[0].view(-1)
        combination.prepare(flat)
    else:
        device = torch.device("cpu") if is_through_host else bucket[0].device
        count, dtype = sum(gradient.numel() for gradient in bucket), bucket[0].dtype
        if memory is None:
            flat = torch.empty(count, dtype=dtype, device=device)
        else:
            flat = memory(device, count * dtype.itemsize).view(dtype)

    def all_reduce(gradients: Sequence[torch.Tensor]) -> dist.Work | None:
        if not is_in_place:
            combination.pack(gradients, buckets.places_in(flat, gradients), flat)
        work: dist.Work | None = dist.all_reduce(flat, group=group, async_op=True)
        return work

    def take(result: torch.Tensor) -> None:
        if not is_in_place:
            buckets.unpack(result, bucket)

    work = buckets.begin(bucket, is_through_host, all_reduce)
    wait = Wait("average of the gradients", group)
    return buckets.SentBucket(flat, work, wait, take, combination.after, 0 if is_in_place else flat.nbytes)


def largest_flags(trained: Sequence[nn.Parameter], control: ProcessGroup, notes: Sequence[int] = ()) -> list[int]:
    """Return the largest ``notes`` of all ranks, then 1 for each parameter that has a gradient on any rank, else 0."""
    return largest_of([*notes, *(parameter.grad is not None for parameter in trained)], control)


def largest_of(flags: Sequence[int], control: ProcessGroup) -> list[int]:
    """Return the largest of each of ``flags``, whether a rank of ``control`` has a gradient; collective over it."""
    return extremes(flags, control, name="gradients that replicas have")[1]


def gradients_of_any_rank(trained: Sequence[nn.Parameter], anywhere: Sequence[int]) -> list[torch.Tensor]:
    """Return the gradients that any rank has, the same list on all ranks; missing ones become zeros on this rank."""
    gradients = []
    for parameter, is_anywhere in zip(trained, anywhere, strict=True):
        if is_anywhere:
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
            gradients.append(dense(parameter.grad, parameter))
    return gradients


def _check_alike(
    kinds: Sequence[object], count: int, control: ProcessGroup, caller: str, things: str, remedy: str
) -> None:
    """Raise ``RuntimeError`` on all ranks of ``control`` unless their ``kinds``, as text, are equal.

    Collective over ``control``. The message has the least and the largest ``count`` of ``things``, and ends with
    ``remedy``.
    """
    smallest, largest = extremes((count, zlib.crc32(repr(kinds).encode())), control)
    if smallest != largest:
        raise RuntimeError(
            f"the data-parallel ranks give {caller} other {things}, {smallest[0]} to {largest[0]} of them, "
            f"and this rank {count}: each would be averaged with another's. {remedy}"
        )


def mean_loss(
    losses: Sequence[torch.Tensor], source: int, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Mean loss over all microbatches and data-parallel replicas, on every rank; all ranks must call this.

    The pipeline's rank ``source`` gives the loss of each microbatch; ``losses`` of others are ignored. Without
    ``dtype``, the dtype of the losses, this rank waits for the device and reads it. Returns a tensor of shape () on
    ``device``.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if parallel_state.get_pipeline_model_parallel_rank() == source:
        mean = torch.stack(list(losses)).mean()
        dtype = mean.dtype
        replicas = parallel_state.get_replica_group()
        loss = on_wire(mean, replicas).double()
        # float64 has the values of all dtypes.
        message = torch.stack([loss, torch.full_like(loss, _DTYPES.index(dtype))])
        with Wait("mean loss", replicas):
            dist.all_reduce(message, group=replicas)
        message /= parallel_state.get_replica_size()
    else:
        message = torch.empty(2, dtype=torch.float64, device=wire_device(device, pipeline))
    with Wait("mean loss", pipeline):
        dist.broadcast(message, group=pipeline, group_src=source)
    return from_wire(message[0].to(dtype or _DTYPES[int(message[1])]), device)
