"""Reduced gradients of a step of ``Zero1Optimizer``, from their reduction to the end of the step."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nxdpp.optimizer.sharded_bucket import Piece, ShardedBucket
from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.reduction_marks import ReductionMarks


class StepReduction:
    """The buckets whose pieces have reduced gradients.

    Args:
        replicas: number of data-parallel ranks.

    Attributes:
        buckets: those with a gradient on any replica.
    """

    def __init__(self, replicas: int) -> None:
        self.buckets: list[ShardedBucket] = []
        control = parallel_state.get_data_parallel_control_group() if replicas > 1 else None
        self._marks = ReductionMarks(control)

    def mark(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients of ``parameters`` for those that were reduced."""
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

    def pieces(self) -> Iterator[Piece]:
        """The pieces of all buckets."""
        return (piece for bucket in self.buckets for piece in bucket.pieces)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients by ``factor``."""
        self.check_done()
        for piece in self.pieces():
            if piece.tensor.grad is not None:
                piece.tensor.grad.mul_(factor)

    def end(self) -> None:
        """Free the reduced gradients."""
        self._marks.clear()
        for bucket in self.buckets:
            bucket.drop_gradients()
        self.buckets = []
