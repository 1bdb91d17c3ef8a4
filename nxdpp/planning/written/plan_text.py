"""Text of a plan: a row for each layout, what the columns mean, and which layouts are in no row.

``print(plan)`` and ``python -m nxdpp plan`` show it::

        layout     schedule  microbatches  with   step, s     memory  bubble
    ------------------------------------------------------------------------
    1   1 x 1 x 2                   1 x 2    z3   0.00225  497.1 KiB    0.0%
    9   1 x 2 x 1  gpipe            1 x 4        0.003012  380.4 KiB   50.2%
"""

from collections.abc import Iterator, Mapping, Sequence

from nxdpp.planning.predict import Prediction
from nxdpp.planning.text_table import bytes_text, table


def layouts_table(best: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table of ``best``, a row each."""
    rows = [_row(number, prediction) for number, prediction in enumerate(best, 1)]
    return table(("", "layout", "schedule", "microbatches", "with", "step, s", "memory", "bubble"), rows, 3)


def sent_table(best: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table of what limits a step, and of the bytes that it sends."""
    sent = [(each.tensor, each.pipeline, each.data) for each in (prediction.most_sent for prediction in best)]
    rows = [
        [str(n), each.limited_by, *map(bytes_text, sizes)]
        for n, (each, sizes) in enumerate(zip(best, sent, strict=True), 1)
    ]
    return table(("", "limited by", "sent: tensor", "pipeline", "data"), rows, 2)


def ranks_table(prediction: Prediction) -> list[str]:
    """Return the lines of the table of a layout's ranks: seconds of a step, and bytes at the peak."""
    rows = [
        [
            str(rank),
            *(f"{seconds:.4g}" for seconds in (times.compute + times.tensor, times.bubble)),
            *map(bytes_text, (memory.weights, memory.gradients, memory.optimizer)),
            bytes_text(max(memory.activations, memory.step)),
            bytes_text(memory.total),
        ]
        for rank, (times, memory) in enumerate(zip(prediction.times, prediction.memory, strict=True))
    ]
    return table(("rank", "compute, s", "waits, s", "weights", "gradients", "optimizer", "activations", "memory"), rows)


def columns(best: Sequence[Prediction]) -> Iterator[str]:
    """Yield sentences about the columns of ``layouts_table``."""
    yield "layout: tensor x pipeline x data ranks. schedule: with its stages per rank, if several."
    yield "microbatches: number x samples of each. memory: of the rank with the most."
    yield "bubble: mean share of the schedule's time in which ranks wait"
    yield "with: c activation checkpointing, s sequence parallel, z1 ZeRO-1 (Zero1Optimizer)"
    yield "z2, z3: ZeRO-2 and 3 (fully_shard), parameters gathered once a step, or for each microbatch"
    if any(prediction.layout.experts > 1 for prediction in best):
        yield "e2: experts divided over 2 replicas (expert_parallelize), as many as the number says"
    yield "Each row is the best schedule and microbatch of its sizes and switches."
    if any(prediction.estimated for prediction in best):
        yield "* estimated from the parameters: some layers cannot run without data"


def left_out(too_large: int, device_memory: int, refused: Mapping[int, str]) -> Iterator[str]:
    """Yield sentences about layouts that are in no table: ``too_large`` ones, and ``refused`` tensor sizes."""
    if too_large:
        yield f"{too_large} layouts, or groups of them, need more than {bytes_text(device_memory)}."
    for size, reason in refused.items():
        yield f"no tensor-parallel size {size}: {reason}"


def _row(number: int, prediction: Prediction) -> list[str]:
    layout = prediction.layout
    on = (("c", layout.checkpoint), (f"z{layout.zero}", layout.zero > 0), ("s", layout.sequence))
    switches = (*on, (f"e{layout.experts}", layout.experts > 1))
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
