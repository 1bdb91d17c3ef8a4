"""``parallelize``: a module or its class, made parallel by a policy.

::

    check arguments ─▶ whole module ─ policy ─▶ UnitLayout ─▶ ranks, values of rank 0 ─▶ class ─▶ ParallelModule
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.doors.nnscaler import generic_plan
from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.end2end import check_forward
from nxdpp.doors.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType
from nxdpp.doors.nnscaler.module_source import ModuleSource
from nxdpp.doors.nnscaler.parallel_module import ParallelModule
from nxdpp.doors.nnscaler.policies import Policy, check_policy, layout_of
from nxdpp.doors.nnscaler.saved_plan import SavedPlan, plan_path, shared_layout, verify_same_plan
from nxdpp.doors.nnscaler.unit_layout import initialize_units


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
    source = ModuleSource(module_or_module_class, module_fn, module_dtype)
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
    # A pipeline makes the values of tensors without memory.
    if not layout.is_pipeline or layout.plan:
        source.check_values()
    initialize_units(compute_config, layout)
    if is_alone:
        verify_same_plan(saved, layout)
    source.take_first_values()
    if layout.tensor > 1 and layout.plan:
        is_default = layout.plan in (generic_plan.plan_for(traced, layout.tensor), generic_plan.rows_plan(traced))
        whole = source.make(without_memory=False)
        layout = replace(layout, plan=generic_plan.checked_plan(whole, dummy_forward_args, layout.plan, is_default))
    attributes = {"_source": source, "_config": compute_config, "_layout": layout, "__module__": __name__}
    made: type[ParallelModule] = type(f"Parallel{source.kind.__name__}", (ParallelModule,), attributes)
    saved.note_loaded()
    if source.given is None:
        return made
    module = made(init_params=init_module_params)
    # The class would keep the given module alive.
    made._source = None
    return module


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
