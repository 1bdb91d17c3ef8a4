"""``Reducer``: gradients of some parameters, summed over the units of a job, with the hooks of a program.

::

    gradients of this unit ─ pre hooks ─▶ sum over the units ─ post hooks ─▶ gradients of the step
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.gradients.gradient_reducer import GradientReducer
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.ranks import parallel_state

DEFAULT_BUCKET_MB = 25.0

ReducerHook = Callable[["Reducer", torch.Tensor], object]
"""A function of a reducer and of a flat bucket of its gradients, of shape (elements,), which it changes in place."""


class Reducer(GradientReducer):
    """Sums the gradients of ``parameters`` over the units in buckets.

    Args:
        parameters: of this rank. All units have them in the same order.
        bucket_bytes: largest size of a bucket.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_bytes: int) -> None:
        group, control = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_control_group()
        super().__init__(parameters, group, control, mean=False, bucket_bytes=bucket_bytes)
        self._pre_hooks: list[ReducerHook] = []
        self._post_hooks: list[ReducerHook] = []

    def register_pre_hook(self, fn: ReducerHook) -> None:
        """Run ``fn(reducer, grad)`` on each bucket before the sum, after hooks that were registered earlier."""
        self._pre_hooks.append(_checked(fn))

    def register_post_hook(self, fn: ReducerHook) -> None:
        """Run ``fn(reducer, grad)`` on each bucket after the sum, after hooks that were registered earlier."""
        self._post_hooks.append(_checked(fn))

    def sync_grads(self) -> None:
        """Sum the gradients over the units, unless that is done; collective over them.

        Raises ``RuntimeError`` if the units have different parameters, or new gradients on some ranks only.
        """
        before = [partial(hook, self) for hook in self._pre_hooks]
        self.reduce(before, [partial(hook, self) for hook in self._post_hooks])


class ZeroReducer(Reducer):
    """Leaves the sum to ``optimizer``: each rank gets the sums of its shards, and ``.grad`` stays the unit's."""

    def __init__(self, optimizer: Zero1Optimizer, bucket_bytes: int) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        super().__init__(parameters, bucket_bytes)
        self._optimizer = optimizer
        self._has_sums = False

    @property
    def is_reduced(self) -> bool:
        """``True`` from ``reduce`` to the end of the step."""
        return self._has_sums

    def reduce(
        self,
        before: Sequence[Callable[[torch.Tensor], object]] = (),
        after: Sequence[Callable[[torch.Tensor], object]] = (),
    ) -> None:
        """Give the shards of this rank their sums; collective over all ranks."""
        self._optimizer.reduce_gradients(before, after)
        self._has_sums = True

    def end_step(self) -> None:
        """Note that the optimizer has stepped, and freed its sums."""
        self._has_sums = False

    def forget(self) -> None:
        """Note that gradients were removed, and the sums by ``zero_grad`` of the optimizer."""
        self._has_sums = False


def bucket_bytes_of(config: ComputeConfig | None) -> int:
    """Largest size of a bucket that ``config`` asks for."""
    size = None if config is None else config.reducer_bucket_cap_mb
    return max(1, int((size or DEFAULT_BUCKET_MB) * 2**20))


def _checked(fn: ReducerHook) -> ReducerHook:
    if not callable(fn):
        raise TypeError(f"a hook must be a function of a reducer and a gradient, not {fn!r:.80}")
    return fn
