"""``ParallelOptimizer``: a subclass of a program's optimizer class that sums over the units.

::

    gradients of this unit ─ pre hooks ─▶ sum over the units ─ post hooks ─▶ gradients of the step
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import currentframe
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.equal_ranks import verify_equal_values
from nxdpp.doors.nnscaler.parallel_module import ParallelModule
from nxdpp.doors.nnscaler.state_dicts.extra_state import add_optimizer_extra_state, take_optimizer_extra_state
from nxdpp.gradients.grad_scaler import GradScaler
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.gradients.gradient_reducer import GradientReducer
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.ground.torch_names import SCALED_STEP
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
        group, control = parallel_state.get_data_parallel_group(), parallel_state.get_replica_control_group()
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
    """Leaves the sum to ``optimizer``: each rank gets the sums of its shards.

    With ``is_whole`` ``.grad`` gets the sums too, and has them until it is removed. Else it stays the unit's.
    """

    def __init__(self, optimizer: Zero1Optimizer, bucket_bytes: int, is_whole: bool) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        super().__init__(parameters, bucket_bytes)
        self._optimizer = optimizer
        self._has_sums, self._is_whole = False, is_whole

    @property
    def is_reduced(self) -> bool:
        """``True`` from ``reduce`` to the end of the step, or of the sums."""
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
        """Note that the optimizer has stepped, and freed the sums of its shards."""
        self._has_sums = self._has_sums and self._is_whole

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


class ParallelOptimizer(Optimizer):
    """An optimizer that ``build_optimizer`` made, and an object of the program's class too.

    ``.grad`` of a parameter is the gradient of this unit until ``sync_shard_grad``, and the sum over the units from
    then on. With ``zero_use_reduce_scatter`` it stays the gradient of this unit, and each rank has the sums of its
    shards.

    Attributes:
        _non_parallel_module_reducer: of the parameters outside of parallel modules; ``None`` without any.
    """

    _module: nn.Module
    _parallel: Sequence[ParallelModule]
    _reducers: Sequence[Reducer]
    _non_parallel_module_reducer: Reducer | None
    _step_number: int
    _verified: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("build_optimizer(module, optimizer_fn) makes parallel optimizers")

    def sync_shard_grad(self) -> None:
        """Sum the gradients over the units, unless that is done; collective over the ranks with the same parameters.

        ``step`` does so first. A program calls it to read gradients, or to change them in place, before the step.

        Before steps 1, 2, 3, 5, 9 ... it compares the values of parameters, and is collective over all ranks.

        Raises ``RuntimeError`` if ranks have different parameters or values, or new gradients on some ranks only, and
        for tensors that a program has put in the place of sums.
        """
        self._verify_values()
        for reducer in self._reducers:
            reducer.sync_grads()

    def scale_grads(self, scale: float) -> None:
        """Multiply the gradients by ``scale``. Raises ``RuntimeError`` before ``sync_shard_grad``."""
        if not all(reducer.is_reduced for reducer in self._reducers):
            raise RuntimeError("the gradients are not summed over the units yet: call sync_shard_grad() first")
        # Gradients of a later train_step are summed now.
        self.sync_shard_grad()
        if isinstance(self, Zero1Optimizer):
            self.scale_gradients(scale)
            return
        with torch.no_grad():
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def clip_gnorm(self, max_norm: float | None = None) -> torch.Tensor:
        """Return the norm of the gradients of the whole module, and clip them; collective over all ranks.

        Sums over the units first. ``max_norm`` of ``None``, 0 or less only measures.

        Returns a tensor of shape (), equal on all ranks: the norm before clipping, float64 for such gradients.
        """
        self.sync_shard_grad()
        limit = math.inf if max_norm is None or max_norm <= 0 else max_norm
        if isinstance(self, Zero1Optimizer):
            return self.clip_gradients(limit)
        return clip_grad_norm(self._parameters(), limit)

    def register_reducer_pre_hook(self, fn: ReducerHook) -> None:
        """Run ``fn(reducer, grad)`` on each flat bucket of this unit's gradients before they are summed."""
        for reducer in self._reducers:
            reducer.register_pre_hook(fn)

    def register_reducer_post_hook(self, fn: ReducerHook) -> None:
        """Run ``fn(reducer, grad)`` on each flat bucket of sums.

        With ``zero_use_reduce_scatter`` a bucket has only this rank's shards.
        """
        for reducer in self._reducers:
            reducer.register_post_hook(fn)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over the units, and step; collective over all ranks.

        ``closure`` computes gradients before the sum. It may call ``sync_shard_grad`` itself. Returns its result.
        """

        def synced() -> Any:
            assert closure is not None
            loss = closure()
            self.sync_shard_grad()
            return loss

        if closure is None:
            self.sync_shard_grad()
        result: Any = super().step(None if closure is None else synced)
        for module in self._parallel:
            module.gather_params()
        for reducer in self._reducers:
            reducer.end_step()
        self._step_number += 1
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of the optimizer's parameters, then of the parallel modules."""
        super().zero_grad(set_to_none)
        for module in self._parallel:
            module.zero_grad(set_to_none)
        for reducer in self._reducers:
            reducer.forget()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Attribute that a scaler reads in its step: refuse torch's, which decides for each rank by itself."""
        scaler = currentframe().f_back.f_locals.get("self")  # type: ignore[union-attr]  # a caller has one
        is_torchs = isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, GradScaler)
        if is_torchs and self._parallel[0].compute_config.ranks > 1:
            raise RuntimeError(
                "torch's GradScaler skips a step for an overflow on this rank alone, and the other ranks would wait: "
                "take nxdpp.GradScaler, which has the same arguments"
            )
        # Fused optimizers set it on the object.
        return bool(vars(self).get(SCALED_STEP.name, False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``RuntimeError``: gradients of parameters outside of the module would not be summed."""
        raise RuntimeError(
            "the gradients of an added group would not be summed over the units: add the parameters to the module, and "
            "call build_optimizer again, whose optimizer_fn may make several groups"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, and which part of the whole it is (``nxdpp_extra_state``)."""
        return add_optimizer_extra_state(self._module, self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this rank has returned. Raises ``ValueError`` for a different rank's state."""
        super().load_state_dict(take_optimizer_extra_state(self._module, self, state_dict))

    def _manage(
        self,
        module: nn.Module,
        parallel: Sequence[ParallelModule],
        reducers: Sequence[Reducer],
        plain_reducer: Reducer | None,
    ) -> None:
        """Take the place of the constructor: the program's class has its own."""
        self._module, self._parallel, self._reducers = module, parallel, reducers
        self._non_parallel_module_reducer = plain_reducer
        self._step_number, self._verified = 0, None

    def _verify_values(self) -> None:
        """Compare the values over the ranks in the steps that do so; collective over all ranks then."""
        number = self._step_number
        if number & (number - 1) or self._verified == number:
            return
        own = {id(parameter) for each in self._parallel for parameter in each.parameters()}
        parallel: dict[str, torch.Tensor] = {}
        plain: dict[str, torch.Tensor] = {}
        for name, parameter in self._module.named_parameters():
            (parallel if id(parameter) in own else plain)[name] = parameter
        # Later, gradients of ranks in one unit may be rounded differently on some devices.
        ranks = self._parallel[0].compute_config.plan_ngpus
        verify_equal_values(parallel, plain, ranks, 1 if number == 0 else ranks)
        self._verified = number

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
