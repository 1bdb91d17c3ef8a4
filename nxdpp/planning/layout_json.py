"""JSON of a layout: all numbers of its ranks and stages, with units in the names. docs/partition.md lists the keys."""

from typing import Any

from nxdpp.pipeline.partition.layer_costs import StateBytes
from nxdpp.planning.layout_report import LayoutResult
from nxdpp.planning.rank_summary import RankSummary
from nxdpp.planning.stage_summary import StageSummary

VERSION = 2
# Figures of the ranks of one pipeline that have a sum.
_SUMMED = (
    *("layers", "parameters", "weight_bytes", "gradient_bytes", "optimizer_bytes", "state_bytes", "work_flops"),
    *("peak_activation_bytes", "transport_bytes", "memory_bytes"),
)


def as_json(result: LayoutResult) -> dict[str, Any]:
    """Return the document."""
    options, layout = result.options, result.layout
    placement = options.schedule.placement
    whole = sum(rank.work for rank in layout.ranks)
    ranks = [_rank(number, rank, whole) for number, rank in enumerate(layout.ranks)]
    return {
        "version": VERSION,
        "kind": "layout",
        "model": result.model,
        "parameters": result.parameters,
        "dtype": result.dtype,
        "dtype_of_configuration": result.named_dtype,
        "optimizer": {
            "name": "Zero1Optimizer(AdamW)" if options.sizes.zero == 1 else "AdamW",
            "state_dtype": result.state_dtype,
            "master_weights": result.has_masters,
        },
        "layout": {
            "pipeline_ranks": options.schedule.ranks,
            "tensor_ranks": options.sizes.tensor,
            "data_replicas": options.sizes.data,
            "stages": placement.stages,
            "sequence_parallel": options.sizes.sequence,
            "zero": options.sizes.zero,
            "partition": "balanced" if options.balanced else "even",
            "memory_limit_bytes": options.memory_limit,
            "device": options.device,
        },
        "schedule": {
            "name": options.schedule_name,
            "microbatches": options.schedule.microbatches,
            "bubble_share": layout.bubble,
            "bubble_share_of_equal_stages": layout.equal_bubble,
        },
        "microbatch_shapes": {name: list(shape) for name, shape in result.inputs.items()},
        "ranks": ranks,
        "stages": [_stage(number, stage, whole) for number, stage in enumerate(layout.stages)],
        "total": {name: sum(rank[name] for rank in ranks) for name in _SUMMED},
        "slowest_rank": layout.slowest,
        "slowest_rank_over_mean": layout.imbalance,
        "rank_of_most_memory": layout.fullest,
    }


def _rank(number: int, rank: RankSummary, whole: float) -> dict[str, Any]:
    return {
        "rank": number,
        "stages": rank.stages,
        "layers": rank.layers,
        **_of_both(rank, whole),
        "transport_bytes": rank.transport,
        "memory_bytes": rank.memory,
    }


def _stage(number: int, stage: StageSummary, whole: float) -> dict[str, Any]:
    return {
        "stage": number,
        "rank": stage.rank,
        "layers": stage.layers,
        **_of_both(stage, whole),
        "forward_flops_of_microbatch": stage.forward,
        "backward_flops_of_microbatch": stage.backward,
        "activation_bytes_of_microbatch": stage.activations,
        "kept_bytes_after_input_gradient": stage.kept,
        "sent_tensors_of_microbatch": stage.sent_tensors,
        "sent_bytes_of_microbatch": stage.sent_bytes,
        "sent_bytes_of_step": {
            "tensor_group": stage.traffic.tensor,
            "gradient_average": stage.traffic.average,
            "reduce_scatter": stage.traffic.reduce_scatter,
            "all_gather": stage.traffic.all_gather,
        },
    }


def _of_both(summary: RankSummary | StageSummary, whole: float) -> dict[str, Any]:
    """Return the figures that ranks and stages have alike; ``whole`` is the work of all ranks."""
    return {
        **_state(summary.state),
        "work_share": summary.work / whole,
        "work_flops": summary.work,
        "microbatches_in_flight": summary.in_flight,
        "peak_activation_bytes": summary.peak_activations,
        "estimated": summary.estimated,
    }


def _state(state: StateBytes) -> dict[str, int]:
    return {
        "parameters": state.parameters,
        "weight_bytes": state.weights,
        "gradient_bytes": state.gradients,
        "optimizer_bytes": state.optimizer,
        "state_bytes": state.total,
    }
