"""``build_optimizer``: an optimizer over the parameters of parallel modules and of the plain ones around them.

::

    build_optimizer ─▶ optimizer_fn(parameters) ─▶ its class under ParallelOptimizer
                                          └─ ZeRO ─▶ Zero1Optimizer of that class, under ParallelOptimizer
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.parallel_module import ParallelModule
from nxdpp.doors.nnscaler.parallel_optimizer import ParallelOptimizer, Reducer, ZeroReducer, bucket_bytes_of
from nxdpp.gradients.optimizer.partial_steps import refuse_partial_step
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
_LOGGER = logging.getLogger(__name__)
_PLAIN = (bool, int, float, str, type(None))


def build_optimizer(
    module: nn.Module,
    optimizer_fn: type[OptimizerT] | Callable[..., OptimizerT],
    compute_config: ComputeConfig | None = None,
    **kwargs: Any,
) -> OptimizerT:
    """Return the optimizer that ``optimizer_fn`` makes of this rank's parameters.

    With ``zero_ngroups`` above 1 it makes groups and is collective over all ranks; else it is not collective.

    Its ``step`` sums the gradients over the units first. It is a ``ParallelOptimizer``, too. Where a parallel module
    has ``use_zero`` it is a ``Zero1Optimizer``, whose units share the state of all modules.

    Args:
        module: a parallel module, or a module with parallel ones in it.
        optimizer_fn: a class, or a function that returns an optimizer. Its first argument is a list of parameters.
        compute_config: for the parameters outside of parallel modules. By default the one of the parallel modules.
        kwargs: other arguments of ``optimizer_fn``.

    Raises:
        TypeError: for an ``optimizer_fn`` that returns no plain optimizer.
        ValueError: for parallel modules, or a ``compute_config``, with different sizes. So for a module for inference,
            and an optimizer that evaluates its closure several times.
        RuntimeError: for a module without parallel ones, for an end-to-end module inside another module, and for an
            optimizer whose step over shards is not the one of the whole parameters.
    """
    parallel = _parallel_modules(module)
    config = _checked_config(module, parallel, compute_config)
    parameters = list(module.parameters())
    made = optimizer_fn(parameters, **kwargs)
    if not isinstance(made, Optimizer) or isinstance(made, ParallelOptimizer) or hasattr(made, "reduce_gradients"):
        raise TypeError(
            f"optimizer_fn must return a plain optimizer, such as torch.optim.AdamW, not a {type(made).__name__}"
        )
    if isinstance(made, LBFGS):
        raise ValueError("LBFGS follows the loss of one unit and a rank's own parameters: take another optimizer")
    _refuse_others(made, parameters)
    # A parallel optimizer is not tried again.
    refuse_partial_step(made)
    own = {id(parameter) for each in parallel for parameter in each.parameters_for_optimizer()}
    plain = [parameter for parameter in parameters if id(parameter) not in own]
    optimizer: Any = made
    reducers: list[Reducer]
    plain_reducer: Reducer | None
    if config.use_zero:
        optimizer = zero_optimizer(made, kwargs, bucket_bytes_of(compute_config or config), config)
        reducers = [ZeroReducer(optimizer, bucket_bytes_of(config), not config.zero_use_reduce_scatter)]
        plain_reducer = reducers[0] if plain else None
    else:
        plain_reducer = Reducer(plain, bucket_bytes_of(compute_config)) if plain else None
        reducers = [Reducer(each.parameters_for_optimizer(), bucket_bytes_of(each.compute_config)) for each in parallel]
        reducers += [] if plain_reducer is None else [plain_reducer]
    kind = type(optimizer)
    optimizer.__class__ = type(f"Parallel{type(made).__name__}", (ParallelOptimizer, kind), {"__doc__": kind.__doc__})
    optimizer._manage(module, parallel, reducers, plain_reducer)
    result: OptimizerT = optimizer
    return result


def sync_grad_when(cond: bool) -> AbstractContextManager[None]:
    """Return a context for backwards whose gradients are summed over the units if ``cond``; not collective.

    It changes nothing: gradients stay this unit's until the optimizer's ``sync_shard_grad`` or step, and so a backward
    sends none to other units.
    """
    return nullcontext()


def _parallel_modules(module: nn.Module) -> list[ParallelModule]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not a {type(module).__name__}")
    found = [each for each in module.modules() if isinstance(each, ParallelModule)]
    if not found:
        raise RuntimeError(f"{type(module).__name__} has no parallel module in it: make one by parallelize first")
    return found


def _checked_config(
    module: nn.Module, parallel: Sequence[ParallelModule], compute_config: ComputeConfig | None
) -> ComputeConfig:
    first = parallel[0].compute_config
    for each in parallel:
        if each.compute_config.use_end2end and each is not module:
            raise RuntimeError(
                f"{type(each).__name__} is end-to-end and inside of a {type(module).__name__}: an end-to-end module "
                f"computes the loss itself. Give build_optimizer that module alone, or leave use_end2end out"
            )
        if each.compute_config.inference_only:
            raise ValueError(f"{type(each).__name__} is for inference: leave inference_only out to train it")
    configs = [each.compute_config for each in parallel] + ([] if compute_config is None else [compute_config])
    if others := [config.gpu_config for config in configs if config.gpu_config != first.gpu_config]:
        raise ValueError(
            f"one optimizer needs the same {' and '.join(first.gpu_config)} everywhere, and was given "
            f"{first.gpu_config} and {others[0]}"
        )
    return _with_one_zero(first, configs)


def _with_one_zero(first: ComputeConfig, configs: Sequence[ComputeConfig]) -> ComputeConfig:
    """Return ``first`` with the settings of ZeRO for an optimizer over modules of ``configs``.

    All state is shared where one module shares its own, by as many units as a module allows. ``.grad`` gets the sums
    unless all modules take reduce-scatter.
    """
    sharing = [config for config in configs if config.use_zero]
    if not sharing:
        return first
    groups = min(config.zero_ngroups for config in sharing)
    scattered = all(config.use_zero and config.zero_use_reduce_scatter for config in configs)
    made = (True, groups, scattered)
    if any((config.use_zero, config.zero_ngroups, config.zero_use_reduce_scatter) != made for config in configs):
        _LOGGER.warning(
            "modules of one optimizer have different settings of ZeRO: it shares the state of all of them, with "
            "use_zero=True, zero_ngroups=%s, zero_use_reduce_scatter=%s",
            *(groups, scattered),
        )
    return replace(first, use_zero=True, zero_ngroups=groups, zero_use_reduce_scatter=scattered)


def _refuse_others(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    given = set(map(id, parameters))
    if any(id(parameter) not in given for group in optimizer.param_groups for parameter in group["params"]):
        raise TypeError(
            "optimizer_fn returned an optimizer with parameters that it was not given, whose gradients would not be "
            "summed: use its first argument"
        )


def zero_optimizer(
    made: Optimizer, kwargs: Mapping[str, Any], bucket_bytes: int, config: ComputeConfig
) -> Zero1Optimizer:
    """Return an optimizer of the class of ``made``, over its groups, whose state the units share.

    With several ``zero_ngroups`` the units of a group share it. Without ``zero_use_reduce_scatter`` ``.grad`` gets the
    sums too. ``made`` is not used any more. ``kwargs`` were the arguments of the class, or of a function that made it.

    Raises ``TypeError`` or ``ValueError`` for a class that is not elementwise, or that cannot be rebuilt the same way.
    """
    kind = type(made)
    accepted = inspect.signature(kind).parameters
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    options = {name: value for name, value in {**made.defaults, **kwargs}.items() if any_name or name in accepted}
    # Each group has all its options; the options of the class come from its arguments.
    zero = Zero1Optimizer(
        [dict(group) for group in made.param_groups],
        kind,
        grad_clipping=False,
        bucket_cap_mb=bucket_bytes / 2**20,
        reduction="sum",
        sharding_groups=config.zero_ngroups,
        whole_gradients=not config.zero_use_reduce_scatter,
        **options,
    )
    before, after = _plain_attributes(made), _plain_attributes(zero.base_optimizer)
    different = sorted(name for name in before if name not in after or before[name] != after[name])
    if different:
        raise ValueError(
            f"use_zero makes the {kind.__name__} of optimizer_fn again over shards, and its attribute {different[0]!r} "
            f"would be lost: let optimizer_fn be a class, or leave use_zero out"
        )
    return zero


def _plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
