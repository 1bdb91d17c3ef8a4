"""``parallelize``: a module or its class, made parallel by a policy.

::

    check arguments ─▶ whole module ─ policy ─▶ UnitLayout ─▶ ranks, values of rank 0 ─▶ class ─▶ ParallelModule
"""

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.doors.nnscaler import generic_plan
from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.end2end import check_forward, sample_name
from nxdpp.doors.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType
from nxdpp.doors.nnscaler.module_values import first_random_state, shared_copy, take_first_values
from nxdpp.doors.nnscaler.parallel_module import ModulePlan, ParallelModule
from nxdpp.doors.nnscaler.policies import Policy, check_policy, layout_of
from nxdpp.doors.nnscaler.saved_plan import SavedPlan, plan_path, shared_layout, verify_same_plan
from nxdpp.doors.nnscaler.unit_layout import UnitLayout, initialize_units
from nxdpp.initialization.deferred_init import deferred_init


def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: dict[str, Any],
    pas_policy: Policy,
    compute_config: ComputeConfig,
    *,
    gen_savedir: str | Path = "./.nnscaler",
    reuse: ReuseType | str = ReuseType.MATCH,
    instance_name: str | None = None,
    load_module: bool = True,
    module_dtype: torch.dtype | None = None,
    module_fn: Callable[[], nn.Module] | None = None,
    init_module_params: bool = True,
    broadcast_strategy: str | BroadcastGenFilesStrategy = "none",
) -> ParallelModule | type[ParallelModule] | None:
    """Make a parallel module of a module, or a class of parallel modules of a class; collective if it is loaded.

    The first loaded module divides the ranks of the job into units (``initialize_model_parallel``). The given module
    stays as it is. All ranks take the values of rank 0.

    Args:
        module_or_module_class: the module, or a class whose objects ``module_fn`` makes.
        dummy_forward_args: a value for each argument of forward, by name. Shapes and dtypes count.
        pas_policy: ``"dp"``, ``"tp"``, ``"pp"``, ``"data"``, ``"hybrid"``, ``"autodist"``, or a function
            ``(graph, compute_config)`` that returns the graph.
        compute_config: ranks and settings.
        gen_savedir: folder in which the plan is kept.
        reuse: when to take a plan that is kept there.
        instance_name: part of the plan's path. By default ``"_"``.
        load_module: ``False`` only makes the plan; that needs no ranks.
        module_dtype: dtype of floating parameters and buffers.
        module_fn: makes the module of a class. By default the class without arguments.
        init_module_params: ``False`` leaves parameters without values until they are loaded.
        broadcast_strategy: how a new plan reaches other hosts.

    Returns:
        A ``ParallelModule`` for a module, a subclass of it for a class, ``None`` without ``load_module``.

    Raises:
        ValueError, TypeError: for arguments that cannot be honoured, before anything is changed.
        RuntimeError: for a kept plan that ``reuse`` does not allow, to load without torchrun's variables, for a
            ``broadcast_strategy`` without ``torch.distributed``, for a module in which others are parallel already, and
            for units whose sizes differ from the job's.
    """
    source = _ModuleSource(module_or_module_class, module_fn, module_dtype)
    if not isinstance(compute_config, ComputeConfig):
        raise TypeError(f"compute_config must be a ComputeConfig, not {compute_config!r:.80}")
    check_forward(source.kind, dummy_forward_args, compute_config.use_end2end)
    check_policy(pas_policy)
    strategy, reuse = BroadcastGenFilesStrategy(broadcast_strategy), ReuseType(reuse)
    _check_start(load_module, strategy)
    traced = source.traced()
    saved = SavedPlan(plan_path(gen_savedir, source.kind, instance_name), traced, compute_config)
    is_alone = not dist.is_initialized()
    layout = shared_layout(
        saved, lambda: layout_of(pas_policy, traced, dummy_forward_args, compute_config), reuse, strategy, load_module
    )
    if not load_module:
        return None
    source.check_values(layout)
    initialize_units(compute_config, layout)
    if is_alone:
        verify_same_plan(saved, layout)
    make = source.maker()
    if layout.tensor > 1 and layout.plan is not None:
        generic_plan.compare(make(False), dummy_forward_args, layout.plan)
    plan = ModulePlan(partial(make, layout.is_pipeline), source.given, compute_config, layout, sample_name(source.kind))
    made: type[ParallelModule] = type(
        f"Parallel{source.kind.__name__}", (ParallelModule,), {"_plan": plan, "__module__": __name__}
    )
    saved.note_loaded()
    if source.given is None:
        return made
    module = made(init_params=init_module_params)
    # The class would keep the given module alive.
    made._plan = None
    return module


class _ModuleSource:
    """The module or class that was given, and the modules that are made of it.

    Attributes:
        given: the module, or ``None`` for a class.
        kind: the class.
    """

    def __init__(
        self,
        module_or_module_class: nn.Module | type[nn.Module],
        module_fn: Callable[[], nn.Module] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._dtype = dtype
        self.given = None if isinstance(module_or_module_class, type) else module_or_module_class
        kind = module_or_module_class if isinstance(module_or_module_class, type) else type(module_or_module_class)
        if not issubclass(kind, nn.Module):
            raise TypeError(f"parallelize takes a module or a class of modules, not {module_or_module_class!r:.80}")
        self.kind = kind
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"module_dtype must be a floating dtype of torch or None, not {dtype!r}")
        if self.given is not None:
            self._check_given(self.given, module_fn)
        elif module_fn is None:
            _check_constructor(kind)
        self._construct = module_fn or kind

    def _check_given(self, given: nn.Module, module_fn: Callable[[], nn.Module] | None) -> None:
        if module_fn is not None:
            raise ValueError("module_fn makes the modules of a class, and an object was given: leave it out")
        for name, part in given.named_modules():
            if isinstance(part, ParallelModule):
                where = f"its {name}" if name else "it"
                raise RuntimeError(
                    f"{type(given).__name__} cannot be made parallel: {where} is a ParallelModule already"
                )

    def traced(self) -> nn.Module:
        """Return a module to trace, whose values do not count."""
        if self.given is not None:
            return self._converted(shared_copy(self.given))
        with torch.random.fork_rng(devices=[]):
            return deferred_init(self._made)

    def check_values(self, layout: UnitLayout) -> None:
        """Raise ``ValueError`` for a given module without memory, unless a pipeline makes its values."""
        if self.given is None or (layout.is_pipeline and layout.plan is None):
            return
        if without := [name for name, parameter in self.given.named_parameters() if parameter.is_meta]:
            raise ValueError(
                f"{without[0]} of the given {self.kind.__name__} is on the meta device and has no values: give a "
                f"module with values, or the class with module_fn"
            )

    def maker(self) -> Callable[[bool], nn.Module]:
        """Return a function that makes the module with the values of rank 0; collective over all ranks.

        Its argument is ``True`` to make a given class without memory: the stages of a pipeline make their own tensors.
        """
        if self.given is not None:
            whole = self._converted(shared_copy(self.given))
            take_first_values(whole)
            return lambda without_memory: whole
        state = first_random_state()

        def make(without_memory: bool) -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                if without_memory:
                    return deferred_init(self._made)
                module = self._made()
            # A constructor may draw from generators other than torch's.
            take_first_values(module)
            return module

        return make

    def _made(self) -> nn.Module:
        module = self._construct()
        if not isinstance(module, self.kind):
            raise ValueError(f"module_fn must return a {self.kind.__name__}, not a {type(module).__name__}")
        return self._converted(module)

    def _converted(self, module: nn.Module) -> nn.Module:
        return module if self._dtype is None else module.to(self._dtype)


def _check_constructor(kind: type[nn.Module]) -> None:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__}() is called without arguments, and has {error}: give module_fn=lambda: "
            f"{kind.__name__}(...)"
        ) from None


def _check_start(load_module: bool, strategy: BroadcastGenFilesStrategy) -> None:
    if strategy is not BroadcastGenFilesStrategy.NONE and not dist.is_initialized():
        raise RuntimeError(
            f"broadcast_strategy={strategy.value!r} needs torch.distributed: call "
            f"torch.distributed.init_process_group() before, or give 'none'"
        )
    is_started = dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
    if load_module and not is_started:
        raise RuntimeError(
            "a parallel module is loaded on the ranks of a job, and this process has no RANK and WORLD_SIZE: start it "
            "with torchrun, or give load_module=False"
        )
