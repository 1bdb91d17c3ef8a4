"""The policy ``autodist``: the layout of a unit with the shortest step that ``nxdpp.plan`` predicts."""

import os
import warnings
from pathlib import Path
from typing import Any

from nxdpp.counted import counted
from nxdpp.devices.memory import device_memory
from nxdpp.doors.nnscaler.compute_config import ComputeConfig, is_whole
from nxdpp.doors.nnscaler.policy_graph import PolicyGraph, default_scheduler, known_schedule
from nxdpp.doors.nnscaler.unit_layout import read_layout, write_layout
from nxdpp.planning.planner import plan
from nxdpp.ranks import parallel_state

_HONOURED = """
    partition_constraints_path pipeline_nstages pipeline_nmicros update_freq pipeline_scheduler pipeline_pivots
    mem_constraint max_partition_degree recompute_modules load_plan_path save_plan_path
"""
# They tune a profiler and a solver that nxdpp does not have.
_WITHOUT_EFFECT = """
    task_name verbose re_profile parallel_profile transient_mem_coef max_pipeline_bubble_ratio
    max_pipeline_unbalance_ratio use_fp16 use_bf16 use_memory_efficient_fp16 use_memory_efficient_bf16
    use_apex_fused_adam_v2
"""
SETTINGS = (*_HONOURED.split(), *_WITHOUT_EFFECT.split())
"""Names that ``pas_config`` may have."""

_GIB = 2**30
_USED = 0.8
"""Share of a device's memory that a layout may take without ``mem_constraint``."""


_NO_SIZES = (
    "A pipeline needs use_end2end=True and pipeline_nmicros or update_freq; without one max_partition_degree must be "
    "plan_ngpus."
)


def autodist(graph: PolicyGraph, compute_config: ComputeConfig) -> None:
    """Divide ``graph`` by the layout with the shortest step of all that fit into memory.

    Raises ``ValueError`` for settings that cannot be honoured, and if no layout fits.
    """
    search = _LayoutSearch(graph, compute_config)
    if path := compute_config.pas_config.get("load_plan_path"):
        graph.take(read_layout(Path(path)))
    else:
        search.divide()
    if path := compute_config.pas_config.get("save_plan_path"):
        write_layout(graph.layout(), Path(path))


class _LayoutSearch:
    """Search of the layout of ``graph`` with the settings of ``pas_config``.

    Raises ``ValueError`` for settings that cannot be honoured.
    """

    def __init__(self, graph: PolicyGraph, compute_config: ComputeConfig) -> None:
        self._graph, self._config = graph, compute_config
        settings = compute_config.pas_config
        stages = settings.get("pipeline_nstages", "auto")
        if stages != "auto" and (not is_whole(stages) or stages < 1):
            raise ValueError(f"pipeline_nstages must be 'auto' or a whole number above 0, not {stages!r}")
        samples: Any = settings.get("pipeline_nmicros", settings.get("update_freq"))
        if isinstance(samples, list | tuple) and samples:
            samples = samples[0]
        if samples is not None and (not is_whole(samples) or samples < 1):
            raise ValueError(f"pipeline_nmicros and update_freq must be whole numbers above 0, not {samples!r}")
        if stages != "auto" and stages > 1:
            compute_config.check_pipeline(stages, samples or 0, default_scheduler(compute_config))
        degree = settings.get("max_partition_degree", compute_config.plan_ngpus)
        if not is_whole(degree) or degree < 1 or compute_config.plan_ngpus % degree:
            raise ValueError(
                f"max_partition_degree={degree!r} must be a divisor of plan_ngpus={compute_config.plan_ngpus}"
            )
        if settings.get("partition_constraints_path"):
            raise ValueError("partition_constraints_path constrains single operations, which nxdpp does not divide")
        scheduler = settings.get("pipeline_scheduler")
        # None for any.
        self._stages = None if stages == "auto" else stages
        self._schedule = None if scheduler is None else known_schedule(scheduler)
        # Samples of a step; None without a pipeline.
        self._microbatches = samples if compute_config.use_end2end and stages != 1 else None
        self._most_tensor = degree
        self._memory = _memory(settings.get("mem_constraint", -1))
        self._pivots = _names(settings.get("pipeline_pivots"))
        # Empty if the planner decides.
        self._recompute = _names(settings.get("recompute_modules"))

    def divide(self) -> None:
        """Divide the graph. Raises ``ValueError`` if no layout fits."""
        graph = self._graph
        if self._pivots:
            graph.take_layers(self._pivots)
        sizes = self._sizes()
        if self._recompute:
            graph.recompute(self._recompute)
        whole = [each for each in sizes if each[1] == 1]
        reason = None
        if self._stages is None and not self._pivots and sizes != whole:
            reason = graph.why_no_pipeline()
        if reason is not None:
            if not whole:
                raise ValueError(f"autodist finds no layout: {reason}")
            warnings.warn(f"autodist compares no pipelines: {reason}", stacklevel=2)
            sizes = whole
        if len(sizes) == 1 and sizes[0][1] == 1 and self._memory is None:
            graph.divide(sizes[0][0])  # there is no choice
            return
        if sizes and sizes[0][0] > 1 and parallel_state.model_parallel_is_initialized():
            raise ValueError(
                "autodist predicts a layout before the ranks of the job are divided into tensor groups: leave "
                "mem_constraint out, give this module another policy, or make its plan with load_module=False in a "
                "process of its own"
            )
        best: Any = None
        reasons = []
        for tensor, pipeline in sizes:
            try:
                found = self._predicted(tensor, pipeline)
            except ValueError as error:
                reasons.append(f"{tensor} tensor-parallel and {counted(pipeline, 'pipeline rank')}: {error}")
                continue
            if best is None or found.step_seconds < best.step_seconds:
                best = found
        if best is None:
            raise ValueError("autodist finds no layout. " + " ".join(reasons or [_NO_SIZES]))
        layout = best.layout
        graph.divide(layout.tensor)
        if layout.pipeline > 1:
            name = "infer_pipe" if self._config.inference_only else layout.schedule
            graph.schedule(name, layout.pipeline * layout.chunks, best.microbatches)
            graph.cut_after(best.cuts)
        if layout.checkpoint and not self._recompute:
            graph.recompute(graph.layers)

    def _sizes(self) -> list[tuple[int, int]]:
        """Return the tensor and pipeline sizes to compare."""
        ranks = self._config.plan_ngpus
        if parallel_state.model_parallel_is_initialized():
            # The ranks of a job are divided once.
            tensor = parallel_state.get_tensor_model_parallel_size()
            return [(tensor, parallel_state.get_pipeline_model_parallel_size())]
        found = [(tensor, ranks // tensor) for tensor in range(1, self._most_tensor + 1) if ranks % tensor == 0]
        if self._microbatches is None:
            return [sizes for sizes in found if sizes[1] == 1]
        if self._stages is not None:
            return [sizes for sizes in found if self._stages % sizes[1] == 0]
        return found

    def _predicted(self, tensor: int, pipeline: int) -> Any:
        """Return the best prediction for these sizes."""
        config, graph = self._config, self._graph
        fixed: dict[str, Any] = {
            "tensor": tensor,
            "pipeline": pipeline,
            "data": config.units,
            "microbatch": 1,
            "sequence": False,
            "zero": int(config.use_zero and config.units > 1),
        }
        if self._schedule is not None and pipeline > 1:
            fixed["schedule"] = self._schedule
        if self._stages is not None:
            fixed["chunks"] = self._stages // pipeline
        if self._recompute:
            fixed["checkpoint"] = True
        if config.inference_only:
            fixed |= {"schedule": "1f1b", "chunks": 1}
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE") or config.ranks)
        return plan(
            graph.module,
            devices=config.ranks,
            device_memory=self._memory or int(_USED * device_memory()),
            global_batch=(self._microbatches or 1) * config.units,
            hosts=config.ranks // on_host if config.ranks % on_host == 0 else 1,
            fixed=fixed,
            # A sample is what one forward takes, whatever its shapes.
            inputs=lambda _: graph.example,
            transformer_layer_cls=list(graph.layer_classes) or None,
            tensor_plan=graph.default_plan(tensor),
            best=1,
        ).first


def _memory(constraint: Any) -> int | None:
    """Return the bytes of a device; ``None`` for a share of all that it has."""
    if constraint == -1:
        return None
    if isinstance(constraint, bool) or not isinstance(constraint, int | float) or constraint <= 0:
        raise ValueError(f"mem_constraint must be a number of GiB above 0, or -1, not {constraint!r}")
    return int(constraint * _GIB)


def _names(text: Any) -> tuple[str, ...]:
    """Return the names in a text with commas, or in a list."""
    if text is None:
        return ()
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(part.strip() for part in parts if part.strip())
