"""Printed table of a plan: its layouts, and the lines that run the first one."""

import sys

from rich.console import Console
from rich.table import Table

from nxdpp.pipeline.planning.plan import Plan
from nxdpp.pipeline.planning.predict import Prediction

_GIB = 2**30


def show(plan: Plan) -> None:
    """Print the layouts of ``plan``, the best first, then the command and the script of the first one."""
    hosts = f"{plan.hosts} host{'s' if plan.hosts > 1 else ''}"
    title = f"{plan.model} in {plan.dtype}, {plan.devices} {plan.device} devices on {hosts}"
    table = Table(title=f"{title}, {plan.global_batch} samples a step")
    table.add_column("")
    for name in (
        "tensor x pipeline x data", "schedule", "stages a rank", "microbatches", "switches", "step, s", "memory, GiB",
        "bubble", "sent: tensor", "pipeline", "data", "limited by",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("schedule", "switches", "limited by") else "right")
    for number, prediction in enumerate(plan.best, 1):
        table.add_row(str(number), *_row(prediction))
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    console.print(table)
    console.print(
        "microbatches: number x samples of each. Memory and sent bytes of a step: of the rank with the most. "
        "c: activation checkpointing, z: ZeRO-1, s: sequence parallel."
    )
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in plan.sample.items())
    console.print(f"microbatch of one sample: {shapes}", markup=False)
    if plan.best and plan.first.estimated:
        console.print("* estimated from the parameters: some layers cannot run without data")
    if plan.too_large:
        console.print(
            f"{plan.too_large} layouts, or groups of them, need more than {plan.device_memory / _GIB:.4g} GiB."
        )
    for size, reason in (plan.refused or {}).items():
        console.print(f"no tensor-parallel size {size}: {reason}", markup=False)
    # Lines to copy must not be broken.
    print(f"\n{plan.torchrun()}\n\n{plan.script()}")


def _row(prediction: Prediction) -> list[str]:
    layout = prediction.layout
    switches = [("c", layout.checkpoint), ("z", layout.zero1), ("s", layout.sequence)]
    sent = prediction.sent
    mark = " *" if prediction.estimated else ""
    return [
        f"{layout.tensor} x {layout.pipeline} x {layout.data}",
        layout.schedule if layout.pipeline > 1 else "",
        str(layout.chunks),
        f"{prediction.microbatches} x {layout.microbatch}",
        " ".join(name for name, is_on in switches if is_on),
        f"{prediction.step_seconds:.4g}{mark}",
        f"{prediction.peak_bytes / _GIB:.4g}{mark}",
        f"{prediction.bubble:.1%}",
        *(_bytes(each) for each in (sent.tensor, sent.pipeline, sent.data)),
        prediction.limited_by,
    ]


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
