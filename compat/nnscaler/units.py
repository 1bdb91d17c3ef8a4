"""Units: consecutive ranks that hold one copy of a parallel module.

8 ranks in units of 4, with pipelines of 2 and 2 tensor-parallel ranks::

    unit 0:  stage 0: 0 1    stage 1: 2 3
    unit 1:  stage 0: 4 5    stage 1: 6 7
"""

import os

import torch.distributed as dist

from nxdpp import parallel_state
from nxdpp.nnscaler.compute_config import ComputeConfig
from nxdpp.nnscaler.unit_layout import UnitLayout

ORDER = ("data", "pipeline", "tensor")


def initialize_units(compute_config: ComputeConfig, layout: UnitLayout) -> None:
    """Divide the ranks of the job into units; collective over all ranks where they are not divided yet.

    Raises:
        ValueError: for a job of another size than ``runtime_ngpus``.
        RuntimeError: for ranks that are divided in another way.
    """
    if not parallel_state.model_parallel_is_initialized():
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        _check_ranks(compute_config, ranks)
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, order=ORDER)
        return
    parallel_state.refuse_in_debug("a parallel module")
    _check_ranks(compute_config, dist.get_world_size())
    size = layout.ranks
    starts = range(0, compute_config.ranks, layout.tensor)
    tensor = [list(range(start, start + layout.tensor)) for start in starts]
    pipelines = [
        list(range(unit + place, unit + size, layout.tensor))
        for unit in range(0, compute_config.ranks, size)
        for place in range(layout.tensor)
    ]
    found = parallel_state.get_tensor_model_parallel_group(True), parallel_state.get_pipeline_model_parallel_group(True)
    if found != (tensor, pipelines):
        raise RuntimeError(
            f"this parallel module needs units of {layout.tensor} tensor-parallel ranks and {layout.pipeline} pipeline "
            f"ranks, and the ranks are divided into tensor groups {found[0]} and pipelines {found[1]}. Give all "
            f"parallel modules of a job the same sizes, and call initialize_model_parallel with order={ORDER}, or not "
            f"at all"
        )


def _check_ranks(compute_config: ComputeConfig, ranks: int) -> None:
    if ranks != compute_config.ranks:
        raise ValueError(f"the job has {ranks} ranks, and compute_config.runtime_ngpus is {compute_config.ranks}")
