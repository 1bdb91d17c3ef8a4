"""Units, consecutive ranks that hold one copy of a parallel module, and ``UnitLayout``, the parallelism inside a unit.

Policies make the layout, saved plans keep it, and parallel modules run it. 8 ranks in units of 4, with pipelines of 2
and 2 tensor-parallel ranks::

    unit 0:  stage 0: 0 1    stage 1: 2 3
    unit 1:  stage 0: 4 5    stage 1: 6 7
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from nxdpp.counted import counted
from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.ranks import parallel_state

_LISTS = ("cuts", "layer_classes", "recompute")
_ORDER = ("data", "pipeline", "tensor")


@dataclass(frozen=True)
class UnitLayout:
    """Division of a module over the ranks of a unit, ``tensor * pipeline`` of them.

    Attributes:
        tensor: number of ranks that share each layer.
        pipeline: number of ranks of the pipeline.
        chunks: number of stages of each rank of the pipeline.
        schedule: schedule of the pipeline by nxdpp's name. ``None`` without a pipeline.
        microbatches: number of samples of a step. ``None`` without a pipeline: any number.
        cuts: names of the layers after which to cut, one fewer than stages.
        layer_classes: names of the classes of these layers. Empty for the layers that nxdpp finds by itself.
        plan: styles of ``nxdpp.tensor_parallelize`` by name pattern, which ``generic_plan.compare`` compares with one
            process. ``None`` for the module's own plan.
        recompute: names of the modules that recompute their forward in the backward.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    schedule: str | None = None
    microbatches: int | None = None
    cuts: tuple[str, ...] = ()
    layer_classes: tuple[str, ...] = ()
    plan: Mapping[str, str] | None = None
    recompute: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks of the unit."""
        return self.tensor * self.pipeline

    @property
    def is_pipeline(self) -> bool:
        """``True`` for a layout with several stages."""
        return self.pipeline * self.chunks > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _LISTS}}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the layout of ``to_dict``. Raises ``TypeError`` and ``KeyError`` for anything else."""
        return cls(**{**fields, **{name: tuple(fields[name]) for name in _LISTS}})


def write_layout(layout: UnitLayout, path: Path) -> None:
    """Write ``layout`` to a JSON file."""
    path.write_text(json.dumps(layout.to_dict(), indent=1) + "\n")


def read_layout(path: Path) -> UnitLayout:
    """Return the layout of ``write_layout``. Raises ``ValueError`` for a missing file, and for anything else."""
    try:
        return UnitLayout.from_dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ValueError(f"there is no layout {path}: write it with save_plan_path") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no layout of a unit ({error}): write it with save_plan_path") from error


def initialize_units(compute_config: ComputeConfig, layout: UnitLayout) -> None:
    """Divide the ranks of the job into units; collective over all ranks if they are not divided yet.

    Raises:
        ValueError: for a job of a different size than ``runtime_ngpus``.
        RuntimeError: for ranks that are divided differently.
    """
    if not parallel_state.model_parallel_is_initialized():
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        _check_ranks(compute_config, ranks)
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, order=_ORDER)
        return
    parallel_state.refuse_in_debug("a parallel module")
    _check_ranks(compute_config, dist.get_world_size())
    units = torch.arange(compute_config.ranks, device="cpu").view(-1, layout.pipeline, layout.tensor)
    wanted = units.flatten(0, 1).tolist(), units.mT.flatten(0, 1).tolist()
    found = parallel_state.get_tensor_model_parallel_group(True), parallel_state.get_pipeline_model_parallel_group(True)
    if found != wanted:
        raise RuntimeError(
            f"this parallel module needs units of {counted(layout.tensor, 'tensor-parallel rank')} and "
            f"{layout.pipeline} pipeline ranks, and the ranks are divided into tensor groups {found[0]} and pipelines "
            f"{found[1]}. Give all parallel modules of a job the same sizes, and call initialize_model_parallel with "
            f"order={_ORDER}, or not at all"
        )


def _check_ranks(compute_config: ComputeConfig, ranks: int) -> None:
    if ranks != compute_config.ranks:
        raise ValueError(
            f"the job has {counted(ranks, 'rank')}, and compute_config.runtime_ngpus is {compute_config.ranks}"
        )
