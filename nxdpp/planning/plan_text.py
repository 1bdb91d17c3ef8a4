"""Text of a plan: its title, a row for each layout, and what the columns mean.

``print(plan)`` and ``python -m nxdpp plan`` show it::

    LlamaForCausalLM, 2 cpu devices on 1 host, 4 samples a step

        layout     schedule  microbatches  with   step, s     memory  bubble
    ------------------------------------------------------------------------
    1   1 x 1 x 2                   1 x 2    z3   0.00225  497.1 KiB    0.0%
    9   1 x 2 x 1  gpipe            1 x 4        0.003012  380.4 KiB   50.2%
"""

from collections.abc import Iterator, Mapping, Sequence

from nxdpp.planning.predict import Prediction
from nxdpp.planning.text_table import bytes_text, table


def title(model: str, machine: tuple[int, str, int], samples: int) -> str:
    """Return the first line for ``machine``, which is the number of devices, their name and the number of hosts."""
    count, device, hosts = machine
    devices = f"{count} {device} device{'s' if count > 1 else ''}"
    return f"{model}, {devices} on {hosts} host{'s' if hosts > 1 else ''}, {samples} samples a step"


def layouts_table(best: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table of ``best``, a row each."""
    rows = [_row(number, prediction) for number, prediction in enumerate(best, 1)]
    return table(("", "layout", "schedule", "microbatches", "with", "step, s", "memory", "bubble"), rows, 3)


def sent_table(best: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table of what limits a step, and of the bytes that it sends."""
    rows = [
        [
            str(number),
            prediction.limited_by,
            *map(bytes_text, (prediction.sent.tensor, prediction.sent.pipeline, prediction.sent.data)),
        ]
        for number, prediction in enumerate(best, 1)
    ]
    return table(("", "limited by", "sent: tensor", "pipeline", "data"), rows, 2)


def columns(best: Sequence[Prediction]) -> Iterator[str]:
    """Yield sentences about the columns of ``layouts_table``."""
    yield "layout: tensor x pipeline x data ranks. schedule: with its stages a rank, if several."
    yield "microbatches: number x samples of each. memory: of the rank with the most."
    yield "bubble: mean share of the schedule's time in which ranks wait"
    yield "with: c activation checkpointing, s sequence parallel, z1 ZeRO-1 (Zero1Optimizer)"
    yield "z2, z3: ZeRO-2 and 3 (fully_shard), parameters gathered once a step, or for each microbatch"
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
    switches = (("c", layout.checkpoint), (f"z{layout.zero}", layout.zero > 0), ("s", layout.sequence))
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
