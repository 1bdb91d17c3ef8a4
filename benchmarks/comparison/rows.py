"""Rows of a comparison: one contender in one case, next to others and to a target."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from benchmarks.report import markdown_table

Entrant = tuple[str, str]
"""Name of a contender and of its schedule family."""

COLUMNS = ("schedule", "contender", "median", "quartiles", "unit", "compared with")
_LEFT = ("schedule", "contender", "unit", "compared with")


@dataclass(frozen=True)
class Verdict:
    """A ratio of medians. ``target`` is the highest ratio allowed, ``None`` without a target."""

    against: str
    ratio: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """True if the ratio is within the target; ``None`` without a target."""
        return None if self.target is None else self.ratio <= self.target

    def __str__(self) -> str:
        target = "" if self.met is None else f" (at most {self.target:g}: {'met' if self.met else 'NOT met'})"
        return f"{self.ratio:.3g} x {self.against}{target}"


@dataclass
class Row:
    """Values of one contender in one case, in ``unit``, one a step."""

    section: str
    case: str
    family: str
    contender: str
    unit: str
    values: list[float]
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile."""
        if len(self.values) == 1:
            return (self.values[0],) * 3
        low, middle, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, middle, high


def case_rows(
    section: str,
    case: str,
    unit: str,
    values: Mapping[Entrant, list[float]],
    others: Callable[[str, str], Mapping[Entrant, float | None]],
) -> list[Row]:
    """The rows of one case. ``others`` names the entrants to compare with one, and the target of each."""
    rows = []
    for (contender, family), own in values.items():
        verdicts = [
            Verdict(_name(entrant, family), statistics.median(own) / statistics.median(values[entrant]), target)
            for entrant, target in others(contender, family).items()
            if entrant in values
        ]
        rows.append(Row(section, case, family, contender, unit, own, verdicts))
    return rows


def rows_as_markdown(rows: Sequence[Row], session: Mapping[str, Any]) -> str:
    """A line about the session, a table for each case, and the number of targets met."""
    parts = [
        "Commit {commit}; {processor}, {cores} cores, load {load_before} before; Python {python}, torch {torch}; "
        "{steps} steps a row after {warm_up}.".format(**session)
    ]
    for (section, case), group in groupby(rows, key=lambda row: (row.section, row.case)):
        table = markdown_table(COLUMNS, [_cells(row) for row in group], _LEFT)
        parts.append(f"**{section}: {case}**\n\n{table}")
    targets = [verdict.met for row in rows for verdict in row.verdicts if verdict.met is not None]
    if targets:
        parts.append(f"{sum(targets)} of {len(targets)} targets are met.")
    return "\n\n".join(parts)


def rows_as_json(rows: Iterable[Row], session: Mapping[str, Any]) -> str:
    """``{"session": …, "rows": […]}``; each row with its quartiles, its verdicts and the targets met."""
    listed = [
        asdict(row)
        | dict(zip(("low", "median", "high"), row.quartiles, strict=True))
        | {"verdicts": [asdict(verdict) | {"met": verdict.met} for verdict in row.verdicts]}
        for row in rows
    ]
    return json.dumps({"session": dict(session), "rows": listed}, indent=1) + "\n"


def _name(entrant: Entrant, family: str) -> str:
    contender, its_family = entrant
    return contender if its_family in (family, "none") else f"{contender} {its_family}"


def _cells(row: Row) -> list[str]:
    low, median, high = map(_number, row.quartiles)
    return [row.family, row.contender, median, f"{low} to {high}", row.unit, "; ".join(map(str, row.verdicts))]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
