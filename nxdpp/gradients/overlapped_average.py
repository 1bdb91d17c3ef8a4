"""Average or sum of gradients that begins during the last backwards of a step, bucket by bucket.

A stage's gradients are final at the end of its last backward in this rank's step. During that backward a gradient is
final once autograd has accumulated it. Buckets are sent in the order of their expected completion::

    last backward of stage 3    ─ bucket 0 ▶ ─ bucket 1 ▶ ...
    last backward of stage 1    ─ bucket 2 ▶ ...
    sums of tied weights        ─ last bucket ▶
    then                        exchange of the missing gradients, end of all messages

The order is the same on all replicas: it follows from the parameters, the schedule and the step before, and a hash of
it is compared. The message of that comparison begins with the step, so that replicas seldom wait for it. Nothing else
waits for another replica before the last action. So transfers of the pipeline, in other groups, never wait for the
average. On a lazy device the buckets of a stage are sent once its last backward has been submitted.

Copies of gradients on their way take at most ``_COPIED_BYTES``. On gloo the next bucket waits until one has arrived,
since a wait would stop the host. On NCCL the stream waits for the oldest one: what a rank starts, and when, must not
follow from what has arrived, which differs by replica. With one hardware queue such ranks would wait in a circle.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from nxdpp.devices.kinds import device_of, has_own_memory
from nxdpp.gradients.average import gradients_of_any_rank, largest_flags, start
from nxdpp.gradients.average_plan import NO_STAGE, AveragePlan, LastBackward
from nxdpp.gradients.buckets import FlatMemory, SentBucket, cut, send_all
from nxdpp.gradients.expert_parameters import is_of_experts, over_replicas
from nxdpp.gradients.gradient_dtype import dense, zero_gradient
from nxdpp.ranks.faults.board import board

# Copies that are sent during backwards take at most so much memory.
_COPIED_BYTES = 256 * 2**20


class AverageReport(NamedTuple):
    """Figures of the average of one step.

    Attributes:
        sent_bytes: gradients of this rank that were averaged.
        early_bytes: gradients whose all-reduce began before the end of this rank's last backward.
        wait_seconds: time of the host between the end of the step's actions and the end of the average.
    """

    sent_bytes: int
    early_bytes: int
    wait_seconds: float

    @property
    def early_share(self) -> float:
        """Share of the bytes, between 0 and 1, whose all-reduce began before the end of the last backward."""
        return self.early_bytes / self.sent_bytes if self.sent_bytes else 0.0


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are sent together; ``remaining`` are not final yet."""

    parameters: list[nn.Parameter]
    remaining: set[int]
    gradients: list[torch.Tensor] = field(default_factory=list)
    sent: SentBucket | None = None


class OverlappedAverage:
    """Averages the gradients of one rank over the replicas, step after step; sums without ``mean``.

    The first step sends nothing early: it finds which parameters have gradients on any replica. ``control`` is a group
    over the ranks of ``group`` for CPU tensors.
    """

    def __init__(self, group: ProcessGroup, control: ProcessGroup, mean: bool = True) -> None:
        self.report = AverageReport(0, 0, 0.0)
        self._group, self._control = group, control
        self._mean = mean
        # Parameters that had a gradient on any replica in the step before, by id.
        self._expected: set[int] = set()
        self._trained: list[nn.Parameter] = []
        self._plan: AveragePlan | None = None
        self._buckets: list[_Bucket] = []
        self._of_parameter: dict[int, _Bucket] = {}
        self._next = 0
        self._hooks: list[RemovableHandle] = []
        self._in_flight: deque[SentBucket] = deque()
        self._memory = FlatMemory()
        self._stage = NO_STAGE
        self._sends_in_backwards = True
        self._waits_stop_streams = dist.get_backend(group) != dist.Backend.GLOO
        self._stages_left = 0
        self._agree: Callable[[], bool] | None = None
        self._has_order = True
        self._early_bytes = 0

    def begin(
        self,
        parameters: Collection[nn.Parameter],
        last: Sequence[LastBackward],
        held_back: Collection[nn.Parameter],
        start_agreement: Callable[[int], Callable[[], bool]],
    ) -> None:
        """Begin a step, of which nothing is sent yet; all replicas give the same ``parameters`` in the same order.

        ``last`` has the last backward of each local stage, in the order of the step. The gradients of ``held_back``
        change after it: tied weights. ``start_agreement`` is called with a hash of the order of the buckets; collective
        over the replicas. Its result is called before a gradient is sent. That returns whether all have this order, and
        raises where they must not continue. The message is on its way meanwhile: replicas need not wait for each other.
        """
        self.abandon()
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._trained:
            return
        held_ids = set(map(id, held_back))
        if self._plan is None or not self._plan.is_for(self._trained, last, held_ids, self._expected):
            self._plan = AveragePlan(self._trained, last, held_ids, self._expected)
        self._buckets = [_Bucket(bucket, {id(parameter) for parameter in bucket}) for bucket in self._plan.buckets]
        self._of_parameter = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        # A message within a backward would end the graph that a lazy device records.
        self._sends_in_backwards = not device_of(self._trained[0].device).is_lazy
        self._stages_left = len(last)
        self._early_bytes = 0
        self._has_order = True
        self._agree = start_agreement(self._plan.order)

    def before_last(self, stage: int) -> None:
        """Note that the last backward of ``stage`` begins."""
        self._agree_once()
        self._finish_completed()
        if self._buckets and not self._hooks:
            # Those that change after it are sent at the end, and their hooks may be held until then (``held_hooks``).
            assert self._plan is not None
            held = self._plan.held_back
            expected = (p for bucket in self._buckets for p in bucket.parameters if id(p) not in held)
            self._hooks = [parameter.register_post_accumulate_grad_hook(self._accumulated) for parameter in expected]
        self._stage = stage

    def after_last(self, stage: int) -> None:
        """Note that the last backward of ``stage`` has ended: all its gradients are final."""
        self._stage = NO_STAGE
        self._stages_left -= 1
        for bucket in self._buckets[self._next :]:
            bucket.remaining -= {each for each in bucket.remaining if self._stage_of(each) == stage}
        self._finish_completed()
        self._send_ready()

    def finish(self) -> None:
        """End the average, after the sums of tied weights; collective over the replicas.

        Raises ``ValueError`` for sparse gradients.
        """
        if not self._trained:
            return
        began = time.perf_counter()
        self._agree_once()
        self._remove_hooks()
        early = self._early_bytes
        # Send the rest.
        for bucket in self._buckets[self._next :]:
            bucket.remaining.clear()
        while self._next < len(self._buckets):
            self._send_ready()
            if self._next < len(self._buckets):
                self._finish_first()
        # Find the gradients that are missing on some replicas, or were not expected.
        for sent in self._in_flight:
            sent.wait_begun()
        anywhere = largest_flags(self._trained, self._control)
        sent_ids = set(self._of_parameter)
        while self._in_flight:
            self._finish_first()
        self._expected = {id(p) for p, is_anywhere in zip(self._trained, anywhere, strict=True) if is_anywhere}
        # Parameters that had no gradient on this rank get the gradient of the others.
        for bucket in self._buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                if parameter.grad is None and id(parameter) in self._expected:
                    parameter.grad = gradient
        with torch.no_grad():
            send_all(partial(self._start, *bucket) for bucket in self._unsent(sent_ids))
        sent_bytes = sum(p.grad.nbytes for p in self._trained if p.grad is not None)
        self.report = AverageReport(sent_bytes, early, time.perf_counter() - began)
        self.abandon()

    def _start(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor], in_place: bool = True, kept: bool = False
    ) -> SentBucket:
        """Start the average of ``gradients``, those of ``parameters``; with ``kept`` in memory of the average."""
        group, combination = over_replicas(is_of_experts(parameters[0]), self._mean, self._group)
        return start(gradients, group, combination, in_place, self._memory.take if kept else None)

    def _unsent(self, sent_ids: set[int]) -> Iterator[tuple[list[nn.Parameter], list[torch.Tensor]]]:
        """Gradients that were not expected, in the buckets of the next step: a ring sums each place in its own order.

        So the first step after the load of a checkpoint gives the values that it has without a load.
        """
        assert self._plan is not None
        if not self._has_order:
            expected = [parameter for parameter in self._trained if id(parameter) in self._expected]
            for bucket in cut(expected, kind_of=is_of_experts):
                yield bucket, gradients_of_any_rank(bucket, [1] * len(bucket))
            return
        if self._expected != self._plan.expected:
            self._plan = AveragePlan(self._trained, self._plan.last, self._plan.held_back, self._expected)
        for bucket in self._plan.buckets:
            unsent = [parameter for parameter in bucket if id(parameter) not in sent_ids]
            if unsent:
                yield unsent, gradients_of_any_rank(unsent, [1] * len(unsent))

    def forget(self) -> None:
        """Forget the parameters, which may have been replaced: the next step sends nothing early."""
        self.abandon()
        self._memory = FlatMemory()
        self._plan, self._expected = None, set()

    def abandon(self) -> None:
        """Forget the present step, which has ended or failed."""
        self._remove_hooks()
        self._trained, self._buckets, self._of_parameter = [], [], {}
        self._in_flight.clear()
        self._agree, self._next, self._stage = None, 0, NO_STAGE

    def _agree_once(self) -> None:
        """Wait for all replicas to begin, once a step."""
        if self._agree is None:
            return
        agree, self._agree = self._agree, None
        if not agree():
            # Replicas with other orders send nothing early.
            self._has_order = False
            self._buckets, self._of_parameter = [], {}

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Hook of autograd: ``parameter.grad`` has a new contribution."""
        bucket = self._of_parameter[id(parameter)]
        if bucket.sent is not None:
            raise RuntimeError(
                f"a parameter of shape {list(parameter.shape)} got a gradient after its average over the replicas had "
                f"begun. A layer of another stage uses it through a hidden reference, or a reentrant checkpoint runs "
                f"its module twice: give torch.utils.checkpoint use_reentrant=False, or make one stage use it."
            )
        if self._stage_of(id(parameter)) == self._stage != NO_STAGE:
            bucket.remaining.discard(id(parameter))
            if self._sends_in_backwards:
                self._send_ready()

    def _send_ready(self) -> None:
        """Send the buckets whose gradients are final, in order, while memory allows."""
        while self._next < len(self._buckets) and not self._buckets[self._next].remaining:
            if sum(sent.copied_bytes for sent in self._in_flight) > _COPIED_BYTES:
                if not self._waits_stop_streams:
                    return
                self._finish_first()
                continue
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        with torch.no_grad():
            gradients = [zero_gradient(p) if p.grad is None else dense(p.grad, p) for p in bucket.parameters]
            # A view may share its memory with a gradient on its way through the graph.
            in_place = self._stage == NO_STAGE or has_own_memory(gradients[0])
            bucket.gradients = gradients
            bucket.sent = self._start(bucket.parameters, gradients, in_place, kept=True)
        self._in_flight.append(bucket.sent)
        if self._stages_left:
            self._early_bytes += sum(gradient.nbytes for gradient in gradients)
        board.moved()

    def _finish_completed(self) -> None:
        """Copy back what has arrived, without waiting; outside of backwards."""
        while not self._waits_stop_streams and self._in_flight and self._in_flight[0].is_completed():
            self._finish_first()

    def _finish_first(self) -> None:
        sent = self._in_flight.popleft()
        with torch.no_grad():
            sent.finish()
        if sent.copied_bytes:
            self._memory.give_back(sent.flat)
        board.moved()

    def _stage_of(self, key: int) -> int:
        """The stage of the last backward of a parameter, by its id."""
        return NO_STAGE if self._plan is None else self._plan.stage_of.get(key, NO_STAGE)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
