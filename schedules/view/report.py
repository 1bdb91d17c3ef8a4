"""What a simulated schedule comes to, in figures: as tables and as JSON."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.families.family import Family
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate

if TYPE_CHECKING:
    from rich.table import Table

# Columns below which a comparison is figures only.
_NARROW = 80


@dataclass(frozen=True)
class Shares:
    """Times of all layers of a rank for one microbatch; a chunk takes its part of them, a transfer all of its own."""

    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float

    def simulate(self, schedule: Schedule) -> Timeline:
        """``schedule`` with these times, equal for all stages."""
        part = len(schedule) / len({action.stage for actions in schedule for action in actions})
        return simulate(
            schedule, self.forward * part, self.input_gradient * part, self.weight_gradient * part, self.transfer
        )

    def text(self) -> str:
        """The times in words."""
        return (
            f"a rank's forward {self.forward:g}, input-gradient {self.input_gradient:g}, weight-gradient "
            f"{self.weight_gradient:g}, transfer {self.transfer:g}"
        )


@dataclass(frozen=True)
class Compared:
    """A family in a comparison."""

    family: Family
    chunks: int
    timeline: Timeline


def compare(ranks: int, microbatches: int, chunks: int | None, shares: Shares) -> list[Compared]:
    """All families, with ``chunks`` chunks a rank where they can have as many, else with what they have."""
    rows = []
    for family in FAMILIES.values():
        fits = chunks is not None and family.most_chunks is None
        placement = family.placement(ranks, chunks if fits else None)
        schedule = family.build(ranks, microbatches, placement.chunks)
        rows.append(Compared(family, placement.chunks, shares.simulate(schedule)))
    return rows


def rank_table(timeline: Timeline) -> "Table":
    """A line a rank: its stages, bubble share and peak."""
    from rich.table import Table

    table = Table()
    for name in ("rank", "stages", "bubble", "peak of live microbatches"):
        table.add_column(name, justify="right", overflow="fold")
    for rank, spans in enumerate(timeline.spans):
        stages = ", ".join(map(str, sorted({span.action.stage for span in spans})))
        table.add_row(str(rank), stages, f"{100 * timeline.bubbles[rank]:.1f} %", f"{timeline.peaks[rank]:g}")
    return table


def comparison_table(rows: list[Compared], width: int, chosen: str | None = None) -> "Table":
    """A line a family; that of ``chosen`` is marked. A narrow one has no frame and no words."""
    from rich.table import Table

    table = Table(caption="v: chunks a rank; peak: live microbatches of the rank that holds most, a chunk being 1/v")
    narrow = width < _NARROW
    if narrow:
        table.box = None
    table.add_column("schedule", no_wrap=True)
    for name in ("v", "makespan", "bubble", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("what it is")
    for row in rows:
        mark = " *" if row.family.name == chosen else ""
        table.add_row(
            row.family.name + mark,
            str(row.chunks),
            f"{row.timeline.makespan:.6g}",
            f"{100 * row.timeline.mean_bubble:.1f} %",
            f"{max(row.timeline.peaks):g}",
            *([] if narrow else [row.family.summary]),
        )
    return table


def as_json(title: str, timeline: Timeline) -> dict[str, Any]:
    """Each rank's actions in order, and when each starts and ends."""
    return {
        "schedule": title,
        "ranks": [[str(span.action) for span in spans] for spans in timeline.spans],
        "times": [[[span.start, span.end] for span in spans] for spans in timeline.spans],
        "makespan": timeline.makespan,
        "bubbles": timeline.bubbles,
        "mean_bubble": timeline.mean_bubble,
        "peaks": timeline.peaks,
    }


def comparison_as_json(rows: list[Compared]) -> dict[str, Any]:
    """The figures of each family."""
    return {
        "families": [
            {
                "name": row.family.name,
                "chunks": row.chunks,
                "makespan": row.timeline.makespan,
                "bubbles": row.timeline.bubbles,
                "mean_bubble": row.timeline.mean_bubble,
                "peaks": row.timeline.peaks,
            }
            for row in rows
        ]
    }
