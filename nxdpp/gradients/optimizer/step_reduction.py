"""Reduced gradients of a step of ``Zero1Optimizer``, from their reduction to the end of the step."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from nxdpp.gradients.buckets import Hook, send_all
from nxdpp.gradients.gradient_norm import counted_share, total_norm
from nxdpp.gradients.gradient_reducer import ReductionMarks
from nxdpp.gradients.optimizer.sharded_bucket import ShardedBucket, ShardedPiece, Sharding
from nxdpp.ranks import parallel_state


class StepReduction:
    """The buckets whose pieces have reduced gradients: the ones with a gradient on any replica.

    Args:
        sharding: the ranks that share the parameters.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._buckets: list[ShardedBucket] = []
        control = parallel_state.get_data_parallel_control_group() if sharding.replicas > 1 else None
        self._marks = ReductionMarks(control)

    def reduce(
        self,
        buckets: Iterable[ShardedBucket],
        present: Sequence[bool],
        before: Sequence[Hook] = (),
        after: Sequence[Hook] = (),
    ) -> None:
        """Average or sum the gradients, each rank its part of each bucket; collective over the replicas.

        ``present`` says for each parameter, by index, whether a replica has its gradient.
        """
        self._buckets = [bucket for bucket in buckets if bucket.has_gradients(present)]
        send_all(partial(bucket.start_reduction, present, before, after) for bucket in self._buckets)

    def mark(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the gradients of ``parameters`` as the reduced ones."""
        self._marks.set(parameters)

    def is_done(self) -> bool:
        """Return whether the present gradients are reduced; collective over the replicas after ``mark``.

        Raises ``RuntimeError`` for gradients that were changed since.
        """
        if not self._marks.is_set:
            return False
        if not self._marks.are_present():
            self.end()
            return False
        self._marks.check_unchanged()
        return True

    def check_done(self) -> None:
        """Raise ``RuntimeError`` before ``mark``."""
        if not self._marks.is_set:
            raise RuntimeError("the gradients of this step are not reduced yet: call reduce_gradients() first.")

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients by ``factor``. Raises ``RuntimeError`` where ``.grad`` was changed since."""
        self.check_done()
        self._multiply(factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the reduced gradients so that their norm is ``max_norm`` at most; return the norm before.

        Collective over all ranks. Infinity only measures. Each element counts once: pieces of a group do not overlap.
        Returns a float32 tensor of shape ().
        """
        pieces = list(self._pieces())
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
        self._marks.check_unchanged()
        for gradient in (gradient for bucket in self._buckets for gradient in bucket.gradients()):
            if isinstance(factor, torch.Tensor):
                gradient.mul_(factor.to(gradient.device, gradient.dtype))
            else:
                gradient.mul_(factor)
        self._marks.follow()

    def _pieces(self) -> Iterator[ShardedPiece]:
        return (piece for bucket in self._buckets for piece in bucket.pieces)
