"""Rows as a table for people."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.resident.rows import MEGABYTE, Row

COLUMNS = ("how", "rank", "owned MB", "peak MB", "limit MB", "imports MB", "seconds", "limit s", "")
_LEFT = ("how", "rank", "")


def print_table(console: Console, rows: Sequence[Row], session: Mapping[str, Any]) -> None:
    """One table, and below it how many targets are met."""
    table = Table(title="peak resident memory above that of import torch, transformers", caption=describe(session))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for case, of_case in groupby(rows, key=lambda row: row.case):
        table.add_row(f"[bold]{case}[/]")
        for row in of_case:
            table.add_row(*cells(row))
        table.add_section()
    console.print(table)
    targets = [row for row in rows if row.met is not None]
    console.print(f"{sum(bool(row.met) for row in targets)} of {len(targets)} targets are met.")


def print_markdown(rows: Sequence[Row], session: Mapping[str, Any]) -> None:
    """The same for a document."""
    print(f"{describe(session)}.\n")
    for case, of_case in groupby(rows, key=lambda row: row.case):
        print(f"**{case}**\n")
        print(_line(COLUMNS))
        print(_line("---" if name in _LEFT else "---:" for name in COLUMNS))
        for row in of_case:
            print(_line(cells(row)))
        print()


def cells(row: Row) -> list[str]:
    """The texts of a row."""
    verdict = {True: "met", False: "NOT met", None: "no target"}[row.met]
    return [
        row.way,
        row.ranks,
        _megabytes(row.owned),
        _megabytes(row.peak),
        "" if row.peak_limit is None else _megabytes(row.peak_limit),
        _megabytes(row.imported),
        f"{row.median_seconds:.2f}" + (f" (to {max(row.seconds):.2f})" if len(row.seconds) > 1 else ""),
        "" if row.seconds_limit is None else f"{row.seconds_limit:g}",
        verdict,
    ]


def describe(session: Mapping[str, Any]) -> str:
    """The session in a line."""
    return (
        f"commit {session['commit']}; {session['processor']}, {session['cores']} cores, {session['memory_gb']} GB, "
        f"load {session['load_before']} before; Python {session['python']}, torch {session['torch']}, transformers "
        f"{session['transformers']}; runs of each rank: {session['runs']}, of the 405B model 1; highest peak, median "
        f"seconds (to the longest)"
    )


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.0f}"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
