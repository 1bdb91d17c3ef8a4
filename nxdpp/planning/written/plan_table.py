"""Table and JSON of the layouts of a plan. docs/planner.md lists the keys."""

from collections.abc import Iterator, Sequence
from typing import Any

from nxdpp.planning.plan import Plan
from nxdpp.planning.predict import Prediction
from nxdpp.planning.text_table import paragraph
from nxdpp.planning.written.plan_text import columns, layouts_table, left_out, ranks_table, sent_table


def show(plan: Plan, dtype: str, source: str, file: str, details: bool = False, notes: Sequence[str] = ()) -> None:
    """Print the layouts of ``plan``, the best first, then the command and the program of the first one.

    Args:
        plan: the plan.
        dtype: sentence about the dtype.
        source: the program; empty where ``file`` has it.
        file: its name in the command.
        details: print a second table.
        notes: sentences below the tables.
    """
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in plan.sample.items())
    print(paragraph(plan.title))
    print(f"parameters: {plan.parameters:,}")
    print(paragraph(f"dtype: {dtype}"))
    print(paragraph(f"optimizer, in all layouts: {_optimizer(plan)}"))
    print(paragraph(f"microbatch of one sample: {shapes}"))
    print()
    print("\n".join(layouts_table(plan.best)))
    if details or len(plan.best) == 1:
        print()
        print("\n".join(ranks_table(plan.first)))
    if details:
        print()
        print("\n".join(sent_table(plan.best)))
    written = "--write train.py: the program below; --write plan.json: for NxDPPModel.from_plan(model, plan)"
    for line in (*notes, *_below(plan, details), written if source else "The program is written. Its start:"):
        print(paragraph(line))
    # Lines to copy must not be broken.
    print(f"\n{plan.torchrun(file)}")
    if source:
        print(f"\n{source}", end="")


def _optimizer(plan: Plan) -> str:
    if plan.has_masters:
        gradients = "" if plan.gradient_dtype is None else f"; gradients add up in {plan.gradient_dtype}"
        return f"AdamW, with moments and copies of the weights in float32 (--zero 0: without){gradients}"
    half = "" if plan.optimizer_dtype == "float32" else ", no float32 copies of the weights: small updates are lost"
    return f"AdamW, with moments in {plan.optimizer_dtype}{half}"


def _below(plan: Plan, details: bool) -> Iterator[str]:
    yield from columns(plan.best)
    if details or len(plan.best) == 1:
        yield "memory of a rank: with flat copies, communicators and messages"
    if details:
        yield "sent: bytes of a step, of the rank with the most"
    yield from left_out(plan.too_large, plan.device_memory, plan.refused or {})
    if not details:
        yield "--details: parts of the step's time, and sent bytes; --json: all numbers"


VERSION = 3


def as_json(plan: Plan, named_dtype: str | None, source: str) -> dict[str, Any]:
    """Return the document. ``named_dtype`` is the configuration's dtype, or ``None``, and ``source`` the program."""
    return {
        "version": VERSION,
        "model": plan.model,
        "dtype": plan.dtype,
        "dtype_of_configuration": named_dtype,
        "autocast": plan.autocast,
        "gradient_dtype": plan.gradient_dtype or plan.dtype,
        "parameters": plan.parameters,
        "optimizer_dtype": plan.optimizer_dtype,
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
        "script": source,
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
        "zero": layout.zero,
        "sequence_parallel": layout.sequence,
        "cuts": prediction.cuts,
        "step_seconds": prediction.step_seconds,
        "memory_bytes": prediction.peak_bytes,
        "bubble_share": prediction.bubble,
        "limited_by": prediction.limited_by,
        "sent_bytes_of_step": {
            "tensor_group": prediction.most_sent.tensor,
            "pipeline": prediction.most_sent.pipeline,
            "data": prediction.most_sent.data,
        },
        "ranks": [
            {
                "rank": number,
                "compute_seconds": times.compute,
                "tensor_group_seconds": times.tensor,
                "bubble_seconds": times.bubble,
                "exchange_seconds": times.exchange,
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
