"""The job of the comparison, and its layouts over 2 and 4 ranks."""

from benchmarks.layouts.job import Shape
from nxdpp.planning.layout import Layout

SHAPE = Shape(hidden=512, middle=1376, layers=8, heads=8, vocabulary=2048, batch=1, length=128, microbatches=8)
"""A Llama with layers of 11 ms on a core. ``microbatches`` samples are a step of all replicas together."""


def _pipelines(ranks: int, schedules: tuple[str, ...]) -> list[Layout]:
    chunked = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")
    return [Layout(pipeline=ranks, schedule=name, chunks=2 if name in chunked else 1) for name in schedules]


LAYOUTS = (
    Layout(tensor=2, microbatch=2),
    Layout(tensor=2, microbatch=4),
    Layout(tensor=2, microbatch=2, sequence=True),
    Layout(tensor=2, microbatch=2, checkpoint=True),
    *_pipelines(2, ("1f1b", "gpipe", "zb-h1", "interleaved", "looped-bfs", "zb-v", "dualpipe-v")),
    Layout(pipeline=2, microbatch=2),
    Layout(pipeline=2, microbatch=2, checkpoint=True),
    Layout(data=2),
    Layout(data=2, microbatch=2),
    Layout(data=2, microbatch=2, zero=1),
    Layout(data=2, microbatch=2, zero=2),
    Layout(data=2, microbatch=2, zero=3),
    Layout(data=2, microbatch=2, checkpoint=True),
    Layout(tensor=4, microbatch=2),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, pipeline=2, microbatch=2, checkpoint=True),
    Layout(tensor=2, data=2, microbatch=2),
    Layout(tensor=2, data=2, microbatch=2, zero=1),
    *_pipelines(4, ("1f1b", "gpipe", "interleaved", "zb-v")),
    Layout(pipeline=2, data=2),
    Layout(pipeline=2, data=2, zero=1),
    Layout(pipeline=2, data=2, zero=2),
    Layout(pipeline=2, data=2, zero=3),
    Layout(pipeline=2, chunks=2, schedule="interleaved", data=2, zero=2),
    Layout(pipeline=2, data=2, checkpoint=True),
    Layout(data=4),
    Layout(data=4, zero=1),
    Layout(data=4, zero=2),
    Layout(data=4, zero=3),
    Layout(data=4, zero=3, checkpoint=True),
)


def describe(layout: Layout) -> str:
    """Return the sizes, the schedule and the switches in a few words."""
    sizes = f"{layout.tensor} x {layout.pipeline} x {layout.data}"
    schedule = f" {layout.schedule}" if layout.pipeline > 1 else ""
    switches = {"sequence": layout.sequence, f"ZeRO-{layout.zero}": layout.zero, "checkpoint": layout.checkpoint}
    return (
        f"{sizes}{schedule}, {', '.join([f'microbatch {layout.microbatch}', *(n for n, on in switches.items() if on)])}"
    )
