"""Rows as a table for people and as JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.rows import Row, Verdict


def print_table(console: Console, rows: Sequence[Row], session: Mapping[str, Any]) -> None:
    """One table, and below it how many targets are met and which are not."""
    table = Table(title="nxdpp beside torch.distributed.pipelining", caption=describe(session))
    for name, justify in COLUMNS:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # rich names these five strings
    for (section, case), group in groupby(rows, key=lambda row: (row.section, row.case)):
        table.add_row(f"[bold]{section}[/]", f"[bold]{case}[/]")
        for row in group:
            table.add_row(*cells(row))
        table.add_section()
    console.print(table)
    targets = [(row, verdict) for row in rows for verdict in row.verdicts if verdict.met is not None]
    missed = [(row, verdict) for row, verdict in targets if not verdict.met]
    if targets:
        console.print(f"{len(targets) - len(missed)} of {len(targets)} targets are met.")
    for row, verdict in missed:
        console.print(f"not met: {row.section}, {row.case}, {row.family}: {verdict_text(verdict)}")


COLUMNS = (
    ("schedule", "left"),
    ("who", "left"),
    ("median", "right"),
    ("quartiles", "right"),
    ("unit", "left"),
    ("beside, and target", "left"),
)


def cells(row: Row) -> list[str]:
    """The texts of a row."""
    spread = f"{_number(row.low)} to {_number(row.high)}"
    beside = "; ".join([*map(verdict_text, row.verdicts), *([row.note] if row.note else [])])
    return [row.family, row.contender, _number(row.median), spread, row.unit, beside]


def describe(session: Mapping[str, Any]) -> str:
    """The session in a line."""
    return (
        f"{session['processor']}, {session['cores']} cores, load {session['load_before']} before; Python "
        f"{session['python']}, torch {session['torch']}; {session['steps']} steps a row after "
        f"{session['warm_up_steps']}"
    )


def print_markdown(rows: Sequence[Row], session: Mapping[str, Any]) -> None:
    """The same table for a document."""
    print(f"{describe(session)}.\n")
    for (section, case), group in groupby(rows, key=lambda row: (row.section, row.case)):
        print(f"**{section}: {case}**\n")
        print(markdown_line([name for name, _ in COLUMNS]))
        print(markdown_line(["---:" if justify == "right" else "---" for _, justify in COLUMNS]))
        for row in group:
            print(markdown_line(cells(row)))
        print()


def markdown_line(texts: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(texts)} |"


def rows_as_json(rows: Iterable[Row], session: Mapping[str, Any]) -> str:
    """``{"session": …, "rows": […]}``; each row with its verdicts and whether they are met."""
    listed = [
        asdict(row) | {"verdicts": [asdict(verdict) | {"met": verdict.met} for verdict in row.verdicts]} for row in rows
    ]
    return json.dumps({"session": dict(session), "rows": listed}, indent=1) + "\n"


def read_rows(content: Mapping[str, Any]) -> list[Row]:
    """The rows that ``rows_as_json`` wrote."""
    return [
        Row(**{**row, "verdicts": [Verdict(v["against"], v["ratio"], v["target"]) for v in row["verdicts"]]})
        for row in content["rows"]
    ]


def verdict_text(verdict: Verdict) -> str:
    """The ratio, and whether it is within its target."""
    text = f"{verdict.ratio:.3g} x {verdict.against}"
    if verdict.met is None:
        return text
    return f"{text} (at most {verdict.target:g}: {'met' if verdict.met else 'NOT met'})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
