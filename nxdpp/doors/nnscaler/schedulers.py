"""Schedulers of nnScaler as schedules of nxdpp."""

from nxdpp.doors.nnscaler.compute_config import INFERENCE_SCHEDULERS, ComputeConfig
from nxdpp.pipeline.config import PipelineConfig

_OURS = {"1f1b": "1f1b", "gpipe": "gpipe", "1f1b_interleaved": "interleaved", "infer_pipe": "1f1b"}
_REFUSED = {
    "1f1b_plus": "puts some stages on all ranks",
    "chimera_direct": "runs microbatches through the stages in two directions",
}


def default_scheduler(compute_config: ComputeConfig) -> str:
    """Return the scheduler of a policy that names none."""
    return INFERENCE_SCHEDULERS[0] if compute_config.inference_only else "1f1b"


def known_schedule(scheduler: str) -> str:
    """Return nxdpp's name of ``scheduler``. Raises ``ValueError`` for one that does not exist or cannot run."""
    if scheduler in _REFUSED:
        raise ValueError(f'pipeline_scheduler={scheduler!r} {_REFUSED[scheduler]}, which nxdpp does not: use "1f1b"')
    name = _OURS.get(scheduler, scheduler)
    try:
        PipelineConfig(schedule=name).choose_schedule(1)
    except ValueError as error:
        raise ValueError(
            f"pipeline_scheduler={scheduler!r}: {error} nnScaler's names are {', '.join((*_OURS, *_REFUSED))}"
        ) from error
    return name


def schedule_of(
    compute_config: ComputeConfig, scheduler: str, ranks: int, stages: int, microbatches: int
) -> tuple[str, int]:
    """Return the schedule and the number of stages a rank of ``scheduler``.

    Raises ``ValueError`` for a pipeline that ``compute_config`` or the schedule does not allow.
    """
    name = known_schedule(scheduler)
    compute_config.check_pipeline(stages, microbatches, scheduler)
    if stages % ranks:
        raise ValueError(f"pipeline_nstages={stages} must be a multiple of the {ranks} ranks of the pipeline (pp_size)")
    chunks = stages // ranks
    if name == "interleaved" and chunks == 1:
        name = "1f1b"
    try:
        chosen = PipelineConfig(microbatches, chunks, name).choose_schedule(ranks)
    except ValueError as error:
        raise ValueError(f"pipeline_scheduler={scheduler!r} with {stages} stages on {ranks} ranks: {error}") from error
    if chosen.placement.chunks != chunks:
        needed = chosen.placement.chunks * ranks
        raise ValueError(
            f"pipeline_scheduler={scheduler!r} has {chosen.placement.chunks} stages a rank: give "
            f"pipeline_nstages={needed} for {ranks} ranks, not {stages}"
        )
    return name, chunks
