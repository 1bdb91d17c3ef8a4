"""JSON of the layouts that a search found, with units in the names. docs/planner.md lists the keys."""

from typing import Any

from nxdpp.pipeline.planning.plan import Plan
from nxdpp.pipeline.planning.predict import Prediction

VERSION = 1


def as_json(plan: Plan, named_dtype: str | None) -> dict[str, Any]:
    """Return the document. ``named_dtype`` is the dtype that the configuration names, or ``None``."""
    return {
        "version": VERSION,
        "kind": "search",
        "model": plan.model,
        "dtype": plan.dtype,
        "dtype_of_configuration": named_dtype,
        "device": plan.device,
        "devices": plan.devices,
        "hosts": plan.hosts,
        "device_memory_bytes": plan.device_memory,
        "samples_of_step": plan.global_batch,
        "microbatch_shapes_of_one_sample": {name: list(shape) for name, shape in plan.sample.items()},
        "layouts": [_layout(prediction) for prediction in plan.best],
        "layouts_predicted": plan.predicted,
        "layouts_too_large": plan.too_large,
        "refused_tensor_ranks": {str(size): reason for size, reason in (plan.refused or {}).items()},
        "torchrun": plan.torchrun(),
        "script": plan.script(),
    }


def _layout(prediction: Prediction) -> dict[str, Any]:
    layout = prediction.layout
    return {
        "tensor_ranks": layout.tensor,
        "pipeline_ranks": layout.pipeline,
        "data_replicas": layout.data,
        "schedule": layout.schedule,
        "stages_of_rank": layout.chunks,
        "microbatches": prediction.microbatches,
        "samples_of_microbatch": layout.microbatch,
        "activation_checkpointing": layout.checkpoint,
        "zero1": layout.zero1,
        "sequence_parallel": layout.sequence,
        "cuts": prediction.cuts,
        "step_seconds": prediction.step_seconds,
        "memory_bytes": prediction.peak_bytes,
        "bubble_share": prediction.bubble,
        "limited_by": prediction.limited_by,
        "sent_bytes_of_step": {
            "tensor_group": prediction.sent.tensor,
            "pipeline": prediction.sent.pipeline,
            "data": prediction.sent.data,
        },
        "ranks": [
            {
                "rank": number,
                "compute_seconds": times.compute,
                "tensor_group_seconds": times.tensor,
                "bubble_seconds": times.bubble,
                "average_seconds": times.average,
                "optimizer_seconds": times.optimizer,
                "weight_bytes": memory.weights,
                "gradient_bytes": memory.gradients,
                "optimizer_bytes": memory.optimizer,
                "peak_activation_bytes": memory.activations,
                "optimizer_step_bytes": memory.step,
                "bucket_bytes": memory.buckets,
                "transport_bytes": memory.transport,
                "memory_bytes": memory.total,
            }
            for number, (times, memory) in enumerate(zip(prediction.times, prediction.memory, strict=True))
        ],
        "estimated": prediction.estimated,
    }
