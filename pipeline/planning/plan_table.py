"""Printed table of a plan: its layouts, and the lines that run the first one."""

from collections.abc import Iterator, Sequence

from nxdpp.pipeline.planning.plan import Plan
from nxdpp.pipeline.planning.predict import Prediction
from nxdpp.pipeline.planning.text_table import bytes_text, paragraph, table


def show(plan: Plan, dtype: str, details: bool = False, notes: Sequence[str] = ()) -> None:
    """Print the layouts of ``plan``, the best first, then the command and the script of the first one.

    ``dtype`` is the sentence about the dtype. With ``details`` there is a second table. ``notes`` are printed below.
    """
    hosts = f"{plan.hosts} host{'s' if plan.hosts > 1 else ''}"
    title = f"{plan.model}, {plan.devices} {plan.device} devices on {hosts}, {plan.global_batch} samples a step"
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in plan.sample.items())
    print(paragraph(title))
    print(paragraph(f"dtype: {dtype}"))
    print(paragraph(f"microbatch of one sample: {shapes}"))
    print()
    rows = [_row(number, prediction) for number, prediction in enumerate(plan.best, 1)]
    print("\n".join(table(("", "layout", "schedule", "microbatches", "with", "step, s", "memory", "bubble"), rows, 3)))
    if details:
        print()
        rows = [_detailed(number, prediction) for number, prediction in enumerate(plan.best, 1)]
        print("\n".join(table(("", "limited by", "sent: tensor", "pipeline", "data"), rows, 2)))
    for line in (*notes, *_below(plan, details)):
        print(paragraph(line))
    # Lines to copy must not be broken.
    print(f"\n{plan.torchrun()}\n\n{plan.script()}")


def _row(number: int, prediction: Prediction) -> list[str]:
    layout = prediction.layout
    switches = (("c", layout.checkpoint), ("z", layout.zero1), ("s", layout.sequence))
    chunks = f" {layout.chunks}" if layout.chunks > 1 else ""
    return [
        f"{number}{'*' if prediction.estimated else ''}",
        f"{layout.tensor} x {layout.pipeline} x {layout.data}",
        f"{layout.schedule}{chunks}" if layout.pipeline > 1 else "",
        f"{prediction.microbatches} x {layout.microbatch}",
        "".join(name for name, is_on in switches if is_on),
        f"{prediction.step_seconds:.4g}",
        bytes_text(prediction.peak_bytes),
        f"{prediction.bubble:.1%}",
    ]


def _detailed(number: int, prediction: Prediction) -> list[str]:
    sent = prediction.sent
    return [str(number), prediction.limited_by, *map(bytes_text, (sent.tensor, sent.pipeline, sent.data))]


def _below(plan: Plan, details: bool) -> Iterator[str]:
    yield "layout: tensor x pipeline x data ranks. schedule: with its stages a rank, if several."
    yield "microbatches: number x samples of each. memory: of the rank with the most."
    yield "with: c activation checkpointing, z ZeRO-1, s sequence parallel"
    if details:
        yield "sent: bytes of a step, of the rank with the most"
    if plan.best and plan.first.estimated:
        yield "* estimated from the parameters: some layers cannot run without data"
    if plan.too_large:
        yield f"{plan.too_large} layouts, or groups of them, need more than {bytes_text(plan.device_memory)}."
    for size, reason in (plan.refused or {}).items():
        yield f"no tensor-parallel size {size}: {reason}"
    if not details:
        yield "--details: parts of the step's time, and sent bytes; --json: all numbers"
