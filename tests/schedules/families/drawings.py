"""Drawings of schedules, as in the docstrings of the families."""

import math

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.simulate import simulate
from nxdpp.schedules.view.labels import NAMES, Labels

# Slots between two ticks; columns of a slot.
_STEP = 5
_CELL = 3


def drawing(schedule: Schedule, slots: int, transfer: float = 0.0) -> str:
    """Return blocks of ``slots`` slots, each with an axis and a line for each rank, and the legend below them.

    A slot is the time of a chunk's forward.
    """
    timeline = simulate(schedule, transfer=transfer)
    labels = Labels(timeline.spans)
    rows = []
    for spans in timeline.spans:
        cells = ["."] * math.ceil(timeline.makespan)
        for span in spans:
            for slot in range(int(span.start), int(span.end)):
                cells[slot] = labels.label(span.action)
        rows.append(cells)
    blocks = []
    for start in range(0, len(rows[0]), slots):
        ticks = range(start, min(start + slots, len(rows[0])), _STEP)
        lines = [f"slot    {''.join(f'|{tick}'.ljust(_STEP * _CELL) for tick in ticks)}"]
        for rank, cells in enumerate(rows):
            lines.append(f"rank {rank}  {''.join(cell.ljust(_CELL) for cell in cells[start : start + slots])}")
        blocks.append("\n".join(f"    {line.rstrip()}" for line in lines))
    kinds = [f"{kind.value} {NAMES[kind]}" for kind in labels.kinds]
    legend = [*kinds, ". bubble", *([labels.legend()] if labels.legend() else [])]
    return "\n\n".join([*blocks, f"    {', '.join(map(str, legend))}"])
