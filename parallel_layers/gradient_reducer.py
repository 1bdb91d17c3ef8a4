"""Gradients of given parameters, reduced over the replicas once for each step."""

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.parallel_layers.gradient_average import Hook
from nxdpp.parallel_layers.reduced_gradients import reduce_gradients
from nxdpp.parallel_layers.reduction_marks import ReductionMarks


class GradientReducer:
    """Reduces the gradients of ``parameters`` over ``group`` where that was not done since they were computed.

    Args:
        parameters, group, control, mean, bucket_bytes: as those of ``reduce_gradients``.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: ProcessGroup,
        control: ProcessGroup,
        *,
        mean: bool = True,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self.parameters = list({id(each): each for each in parameters}.values())
        self._group, self._control = group, control
        self._mean, self._bucket_bytes = mean, bucket_bytes
        self._marks = ReductionMarks(control)

    @property
    def is_reduced(self) -> bool:
        """``True`` after ``reduce``, until ``forget``."""
        return self._marks.is_set

    def reduce(self, before: Sequence[Hook] = (), after: Sequence[Hook] = ()) -> None:
        """Reduce the gradients in place; collective over the group. Nothing happens where they are reduced already.

        A backward after it raises ``RuntimeError``, unless ``zero_grad`` has removed the gradients. New gradients are
        reduced by the next call. ``before`` and ``after`` are as those of ``reduce_gradients``, which also tells what
        is raised.
        """
        if self._marks.are_present():
            return
        reduce_gradients(
            self.parameters,
            self._group,
            self._control,
            mean=self._mean,
            before=before,
            after=after,
            bucket_bytes=self._bucket_bytes,
        )
        self._marks.set(parameter for parameter in self.parameters if parameter.requires_grad)

    def end_step(self) -> None:
        """Note that an optimizer has stepped with the gradients. They stay reduced until they are removed."""
        if self._marks.is_set:
            self._marks.end_step()

    def forget(self) -> None:
        """Take the gradients from now on for those of this rank alone: after ``zero_grad``."""
        self._marks.clear()
