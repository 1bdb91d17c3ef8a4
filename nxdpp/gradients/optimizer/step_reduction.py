"""Reduced gradients of a step of ``Zero1Optimizer``, from the agreement of the replicas to the end of the step."""

import math
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.gradients.average import largest_of
from nxdpp.gradients.buckets import Hook, send_all
from nxdpp.gradients.gradient_norm import counted_share, total_norm
from nxdpp.gradients.gradient_reducer import ReductionMarks
from nxdpp.gradients.optimizer.sharded_bucket import ShardedBucket, Sharding
from nxdpp.gradients.optimizer.zero1_state import options_of
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import extremes


class StepReduction:
    """The buckets whose pieces have reduced gradients: the ones with a gradient on any replica."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._buckets: list[ShardedBucket] = []
        control = parallel_state.get_replica_control_group() if sharding.replicas > 1 else None
        self._marks = ReductionMarks(control, are_results=sharding.whole)

    def reduce(
        self,
        buckets: Iterable[ShardedBucket],
        present: Sequence[bool],
        before: Sequence[Hook] = (),
        after: Sequence[Hook] = (),
    ) -> None:
        """Average or sum the gradients that are ``present`` on any replica, by index; collective over the replicas."""
        self._buckets = [each for each in buckets if any(present[member.index] for member in each.members)]
        send_all(partial(bucket.start_reduction, present, before, after) for bucket in self._buckets)

    def mark(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the gradients of ``parameters`` as the reduced ones."""
        self._marks.set(parameters)

    def is_done(self) -> bool:
        """Return whether the present gradients are reduced; collective over the replicas after ``mark``.

        Raises ``RuntimeError`` for gradients that were changed since, unless ``.grad`` has the result.
        """
        if not self._marks.is_set:
            return False
        if not self._marks.are_present():
            self.end()
            return False
        self._follow()
        return True

    def check_done(self) -> None:
        """Raise ``RuntimeError`` before ``mark``."""
        if not self._marks.is_set:
            raise RuntimeError("the gradients of this step are not reduced yet: call reduce_gradients() first.")

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients by ``factor``. Raises as ``is_done`` does."""
        self.check_done()
        self._follow()
        self._multiply(factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the reduced gradients so that their norm is ``max_norm`` at most; return the norm before.

        Collective over all ranks. Infinity only measures. Each element counts once: pieces of a group do not overlap.
        Returns a tensor of shape (): float64 where this rank has pieces in float64, float32 otherwise.
        """
        self._follow()
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        gradients = [piece.tensor.grad for piece in pieces if piece.tensor.grad is not None]
        shares = [counted_share(piece.member.parameter) for piece in pieces if piece.tensor.grad is not None]
        of_shards = [] if self._sharding.group is None else [self._sharding.group]
        groups = [*of_shards, parallel_state.get_model_parallel_group()]
        norm = total_norm(gradients, shares, 2.0, groups)
        if max_norm == math.inf:
            return norm
        self._multiply((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def gather(self) -> None:
        """Give all replicas the values of the pieces, and end the step; collective over the replicas.

        Whole gradients stay reduced until they are removed.
        """
        send_all(bucket.start_gathering for bucket in self._buckets)
        if self._sharding.whole:
            self._marks.end_step()
        else:
            self.end()

    def end(self) -> None:
        """Free the reduced gradients."""
        self._marks.clear()
        for bucket in self._buckets:
            bucket.drop_gradients()
        self._buckets = []

    def _multiply(self, factor: float | torch.Tensor) -> None:
        for gradient in (gradient for bucket in self._buckets for gradient in bucket.gradients()):
            if isinstance(factor, torch.Tensor):
                gradient.mul_(factor.to(gradient.device, gradient.dtype))
            else:
                gradient.mul_(factor)
        self._marks.follow()

    def _follow(self) -> None:
        """Give the pieces what a program has changed in whole gradients; other changes are an error."""
        self._marks.check_unchanged()
        for bucket in self._buckets if self._sharding.whole else ():
            bucket.take_whole_gradients()


class ReplicaPosition(NamedTuple):
    """Numbers that are equal on replicas in the same step.

    ``trainings`` counts the training steps before it. ``layout`` is a hash of the buckets, ``options`` of the groups'
    options.
    """

    step: int
    trainings: int
    layout: int
    parameters: int
    options: int


def hash_of_options(groups: Sequence[dict[str, Any]], settings: Sequence[Any]) -> int:
    """Return a hash of the options of ``groups``, and of ``settings``, that replicas must have alike."""
    options = [
        sorted((key, value) for key, value in group.items() if isinstance(value, bool | int | float | str | tuple))
        for group in map(options_of, groups)
    ]
    return zlib.crc32(repr((options, *settings)).encode())


def present_anywhere(present: Sequence[bool], own: ReplicaPosition) -> list[bool]:
    """Return for each parameter whether it is ``present`` on a replica; collective over the replicas.

    Raises ``RuntimeError`` on all of them unless they have the same position.
    """
    control = parallel_state.get_replica_control_group()
    # The first message has a length that all replicas know.
    smallest, largest = extremes(own, control)
    if smallest != largest:
        raise RuntimeError(_difference(ReplicaPosition(*smallest), ReplicaPosition(*largest)))
    return list(map(bool, largest_of(present, control)))


def _difference(smallest: ReplicaPosition, largest: ReplicaPosition) -> str:
    if (smallest.layout, smallest.parameters) != (largest.layout, largest.parameters):
        return (
            f"the data-parallel replicas give Zero1Optimizer different parameters ({smallest.parameters} and "
            f"{largest.parameters}, of different layouts). Make it with the same parameters, and set the same "
            f"requires_grad, on every replica."
        )
    if smallest.step != largest.step:
        return (
            f"a data-parallel replica is in step {smallest.step} of its Zero1Optimizer, and another in step "
            f"{largest.step}: make each call of step() on every rank."
        )
    if smallest.trainings != largest.trainings:
        return (
            f"a data-parallel replica has made {counted(smallest.trainings, 'training step')} before step "
            f"{smallest.step} of its Zero1Optimizer, and another {largest.trainings}: their gradients belong to "
            "different batches. Make each call of run_train and of step() on every rank."
        )
    return (
        "the data-parallel replicas have different options in the groups of their Zero1Optimizer, such as lr, or "
        "another max_norm, sharding_groups or whole_gradients: each would step its part of the parameters by its own. "
        "Give a scheduler the same numbers on every replica (ReduceLROnPlateau: the mean loss of "
        "broadcast_and_average_loss=True)."
    )
