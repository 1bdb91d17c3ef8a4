"""``ComputeConfig``: the ranks of a unit and of the job, verified at construction. It knows no torch."""

import logging
import os
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol

from nxdpp.counted import counted

if TYPE_CHECKING:
    from torch import distributed

_LOGGER = logging.getLogger(__name__)

TRACE_STRATEGIES = ("cpu", "cuda", "meta", "cuda_run_cpu_offload", "reuse_cache")
INFERENCE_SCHEDULERS = ("infer_pipe",)


@dataclass(frozen=True)
class ComputeConfig:
    """Ranks and settings of a parallel module, with nnScaler's names and defaults.

    A *unit* is ``plan_ngpus`` consecutive ranks that hold one copy of the module.

    Attributes:
        plan_ngpus: number of ranks of a unit.
        runtime_ngpus: number of ranks of the job, a multiple of ``plan_ngpus``. By default ``WORLD_SIZE``.
        constant_folding, trace_strategy: verified and kept in the plan. They have no effect.
        use_zero: share the optimizer state among the units (ZeRO-1).
        zero_ngroups: number of groups of units. The units of a group share the state, and each group has all of it.
        zero_use_reduce_scatter: each rank gets the sums of its shards only, and ``.grad`` stays its unit's gradient.
        inference_only: the module is never trained.
        use_end2end: forward takes one sample and returns the loss first.
        use_async_reducer: verified. The optimizer of ``build_optimizer`` sums the gradients after the backwards.
        reducer_bucket_cap_mb: megabytes (2**20) of gradients in one exchange. ``None`` and 0 for 25.
        pas_config: settings of the policy. Keys that begin with ``_`` are the user's own.
        user_config: values of the user. A saved plan fits only equal ones.

    Raises:
        ValueError: for a number that cannot be used, and without ``runtime_ngpus`` and ``WORLD_SIZE``.
        TypeError: for a value of the wrong type.
    """

    plan_ngpus: int
    runtime_ngpus: int | None = None
    constant_folding: bool = False
    trace_strategy: str = "cuda_run_cpu_offload"
    use_zero: bool = False
    zero_ngroups: int = 1
    zero_use_reduce_scatter: bool = False
    inference_only: bool = False
    use_end2end: bool = False
    use_async_reducer: bool = False
    reducer_bucket_cap_mb: float | None = None
    pas_config: dict[str, Any] = field(default_factory=dict)
    user_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Verify every field."""
        if self.runtime_ngpus is None:
            object.__setattr__(self, "runtime_ngpus", _world_size())
        self._check_types()
        for name in ("plan_ngpus", "runtime_ngpus"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.ranks % self.plan_ngpus:
            raise ValueError(f"runtime_ngpus={self.ranks} must be a multiple of plan_ngpus={self.plan_ngpus}")
        self._check_zero()
        if self.trace_strategy not in TRACE_STRATEGIES:
            raise ValueError(f"trace_strategy must be one of {', '.join(TRACE_STRATEGIES)}, not {self.trace_strategy}")
        if (self.reducer_bucket_cap_mb or 0) < 0:
            raise ValueError(f"reducer_bucket_cap_mb must not be negative: {self.reducer_bucket_cap_mb}")

    def _check_types(self) -> None:
        for name in ("plan_ngpus", "runtime_ngpus", "zero_ngroups"):
            _check_type(name, getattr(self, name), Integral, "a whole number")
            object.__setattr__(self, name, int(getattr(self, name)))
        for each in fields(self):
            if each.type is bool and not isinstance(getattr(self, each.name), bool):
                remedy = ": nxdpp.fully_shard shards parameters, of an NxDPPModel" if each.name == "use_zero" else ""
                raise TypeError(f"{each.name} must be True or False, not {getattr(self, each.name)!r}{remedy}")
        if self.reducer_bucket_cap_mb is not None:
            _check_type("reducer_bucket_cap_mb", self.reducer_bucket_cap_mb, Real, "a number of megabytes or None")
        for name in ("pas_config", "user_config"):
            _check_type(name, getattr(self, name), dict, "a dict")

    def _check_zero(self) -> None:
        if not self.use_zero:
            if self.zero_ngroups != 1:
                _LOGGER.warning("zero_ngroups=%s has no effect without use_zero: it is now 1", self.zero_ngroups)
                object.__setattr__(self, "zero_ngroups", 1)
            return
        if self.zero_ngroups <= 0:
            raise ValueError(f"zero_ngroups must be above 0, not {self.zero_ngroups}")
        if self.units % self.zero_ngroups:
            raise ValueError(f"zero_ngroups={self.zero_ngroups} must divide the {self.units} units")
        if self.zero_use_reduce_scatter and self.zero_ngroups != 1:
            raise ValueError(f"zero_use_reduce_scatter=True needs zero_ngroups=1, not {self.zero_ngroups}")

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        assert self.runtime_ngpus is not None  # set at construction
        return self.runtime_ngpus

    @property
    def units(self) -> int:
        """Number of units of the job."""
        return self.ranks // self.plan_ngpus

    @property
    def gpu_config(self) -> dict[str, int]:
        """Numbers of ranks, equal for all parallel modules of a model."""
        return {"plan_ngpus": self.plan_ngpus, "runtime_ngpus": self.ranks}

    @property
    def graph_config(self) -> dict[str, Any]:
        """Fields that a traced graph depends on."""
        return {
            "constant_folding": self.constant_folding,
            "user_config": self.user_config,
            "inference_only": self.inference_only,
            "end2end_mode": self.use_end2end,
            "trace_strategy": self.trace_strategy,
        }

    @property
    def module_dedup_group_size(self) -> int:
        """Number of ranks that together hold a module once."""
        return self.plan_ngpus

    @property
    def optimizer_dedup_group_size(self) -> int:
        """Number of ranks that together hold an optimizer's state once."""
        return self.ranks // self.zero_ngroups if self.use_zero else self.plan_ngpus

    def get_sync_group(self) -> "tuple[list[int], distributed.ProcessGroup]":
        """Return the ranks with the same weights as this one in all units, and their group.

        Raises ``RuntimeError`` before a parallel module is loaded, and for units of a different size.
        """
        from torch import distributed

        from nxdpp.ranks import parallel_state

        group = parallel_state.get_data_parallel_group()
        ranks = distributed.get_process_group_ranks(group)
        if len(ranks) != self.units:
            raise RuntimeError(f"the job has {counted(len(ranks), 'unit')}, and this ComputeConfig {self.units}")
        return ranks, group

    def check_end2end(self) -> None:
        """Raise ``ValueError`` for a pipeline of a module that is not end-to-end."""
        if not self.use_end2end:
            raise ValueError(
                "a pipeline needs use_end2end=True: forward then takes one sample and returns the loss. Other modules "
                "take the policies dp, tp, data and autodist"
            )

    def check_pipeline(self, stages: int, microbatches: int, scheduler: str) -> None:
        """Raise ``ValueError`` for a pipeline that the fields do not allow."""
        self.check_end2end()
        for name, value in (("pipeline_nmicros", microbatches), ("pipeline_nstages", stages)):
            if not is_whole(value) or value <= 0:
                raise ValueError(f"{name} must be a whole number above 0, not {value!r}")
        if self.inference_only != (scheduler in INFERENCE_SCHEDULERS):
            mode = "inference" if self.inference_only else "training"
            raise ValueError(
                f"pipeline_scheduler={scheduler!r} is not supported in {mode} mode: {INFERENCE_SCHEDULERS[0]!r} and "
                f"inference_only=True go together"
            )

    def apply_pipeline_scheduler(
        self, graph: "Schedulable", pipeline_nstages: int, pipeline_nmicros: int, pipeline_scheduler: str
    ) -> None:
        """Set the pipeline of the graph of a policy function, as ``graph.schedule`` does.

        Raises ``ValueError`` for a pipeline that the fields do not allow.
        """
        self.check_pipeline(pipeline_nstages, pipeline_nmicros, pipeline_scheduler)
        graph.schedule(pipeline_scheduler, pipeline_nstages, pipeline_nmicros)


class Schedulable(Protocol):
    """Graph of a policy function (``PolicyGraph``)."""

    def schedule(self, name: str, stages: int, microbatches: int) -> None:
        """Run ``stages`` as a pipeline."""


def is_whole(value: Any) -> bool:
    """Return whether ``value`` is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal() or not int(text):
        raise ValueError("runtime_ngpus is not given and WORLD_SIZE is not set: give it, or start with torchrun")
    return int(text)


def _check_type(name: str, value: object, kind: type, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, not {value!r}")
