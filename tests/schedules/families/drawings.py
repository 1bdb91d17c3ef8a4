"""Drawings of schedules, as in the docstrings of the families."""

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.simulate import simulate


def drawing(schedule: Schedule, slots: int, transfer: float = 0.0) -> str:
    """Return one line for each rank with a column for each slot. Small letters are the first of several chunks."""
    lines = []
    for rank, spans in enumerate(simulate(schedule, transfer=transfer).spans):
        first = min(span.action.stage for span in spans)
        several = len({span.action.stage for span in spans}) > 1
        cells = ["."] * slots
        for stage, kind, microbatch, _ in (span.action for span in spans):
            letter = kind.value.lower() if several and stage == first else kind.value
            span = next(s for s in spans if s.action[:3] == (stage, kind, microbatch))
            for slot in range(int(span.start), int(span.end)):
                if slot < slots:
                    cells[slot] = f"{letter}{microbatch}"
        more = " ..." if spans[-1].end > slots else ""
        lines.append(f"    rank {rank}  {' '.join(f'{cell:<2}' for cell in cells)}".rstrip() + more)
    return "\n".join(lines)
