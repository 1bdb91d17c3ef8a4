"""Figures of simulated schedules as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.families.family import Family
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.additions import OF_ZERO, add
from nxdpp.schedules.simulate import Span, Timeline, simulate
from nxdpp.schedules.view.axis import number
from nxdpp.schedules.view.tables import tables

if TYPE_CHECKING:
    from rich.table import Table

# A comparison below this width has no descriptions.
_NARROW = 80


@dataclass(frozen=True)
class Shares:
    """Times of all layers of a rank for one microbatch; a chunk takes its share, a transfer its full time.

    ``exchange`` is that of a gather or reduction of all layers, which replicas make with a stage ``zero`` of ZeRO.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float
    exchange: float = 0.0
    zero: int = 0

    def simulate(self, schedule: Schedule) -> Timeline:
        """Simulate ``schedule`` with equal times for all stages."""
        part = _part(schedule)
        with_exchanges = [add(actions, OF_ZERO[self.zero]) for actions in schedule] if self.exchange else schedule
        return simulate(
            with_exchanges,
            self.forward * part,
            self.input_gradient * part,
            self.weight_gradient * part,
            self.transfer,
            self.exchange * part,
        )

    def axis_legend(self, schedule: Schedule) -> str:
        """Return the unit of the time axis in words."""
        part = _part(schedule)
        text = f"time: a rank's forward takes {self.forward:.12g}"
        return text if part == 1 else f"{text}, a chunk's {number(self.forward * part)}"

    def text(self) -> str:
        """Return the times as text."""
        return (
            f"a rank's forward {self.forward:.12g}, input-gradient {self.input_gradient:.12g}, weight-gradient "
            f"{self.weight_gradient:.12g}, transfer {self.transfer:.12g}"
            + (f", exchange of ZeRO-{self.zero} {self.exchange:.12g}" if self.exchange else "")
        )


def _part(schedule: Schedule) -> float:
    """Return the part of a rank's layers in a stage."""
    return len(schedule) / len({action.stage for actions in schedule for action in actions})


@dataclass(frozen=True)
class Compared:
    """A family in a comparison."""

    family: Family
    chunks: int
    timeline: Timeline


def compare(ranks: int, microbatches: int, chunks: int | None, shares: Shares) -> list[Compared]:
    """Simulate all families, with ``chunks`` chunks per rank where the family allows it, else with its default."""
    rows = []
    for family in FAMILIES.values():
        fits = chunks is not None and family.any_chunks
        placement = family.placement(ranks, chunks if fits else None)
        schedule = family.build(ranks, microbatches, placement.chunks)
        rows.append(Compared(family, placement.chunks, shares.simulate(schedule)))
    return rows


def rank_tables(timeline: Timeline, width: int) -> "list[Table]":
    """Return the stages, bubble and peak of each rank, in tables of at most ``width`` columns."""
    rows = [
        [str(rank), stages_of(spans), f"{100 * timeline.bubbles[rank]:.1f} %", f"{timeline.peaks[rank]:g}"]
        for rank, spans in enumerate(timeline.spans)
    ]
    return tables(("rank", "stages", "bubble", "peak of microbatches in flight"), rows, width)


def stages_of(spans: Sequence[Span]) -> str:
    """The stages of a rank as text."""
    return ", ".join(map(str, sorted({span.action.stage for span in spans})))


def comparison_tables(rows: list[Compared], width: int, chosen: str | None = None) -> "list[Table]":
    """Return a line a family, with a mark at ``chosen``. Narrow tables have no descriptions."""
    cells = [
        [
            row.family.name + (" *" if row.family.name == chosen else ""),
            str(row.chunks),
            number(row.timeline.makespan),
            f"{100 * row.timeline.mean_bubble:.1f} %",
            f"{max(row.timeline.peaks):g}",
            row.family.summary,
        ]
        for row in rows
    ]
    heads = ("schedule", "v", "makespan", "bubble", "peak", "description")
    if width >= _NARROW:
        return tables(heads, cells, width, folded=5)
    return tables(heads[:-1], [row[:-1] for row in cells], width)


def as_json(title: str, timeline: Timeline) -> dict[str, Any]:
    """Return each rank's actions in order, with start and end, and the figures."""
    return {
        "schedule": title,
        "ranks": [[str(span.action) for span in spans] for spans in timeline.spans],
        "times": [[[span.start, span.end] for span in spans] for spans in timeline.spans],
        **_figures(timeline),
    }


def comparison_as_json(rows: list[Compared]) -> dict[str, Any]:
    """Return the figures of each family."""
    return {"families": [{"name": row.family.name, "chunks": row.chunks, **_figures(row.timeline)} for row in rows]}


def _figures(timeline: Timeline) -> dict[str, Any]:
    names = ("makespan", "bubbles", "mean_bubble", "peaks")
    return {name: getattr(timeline, name) for name in names}
